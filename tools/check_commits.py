#!/usr/bin/env python3
"""Checks the subjects of commits: "area: imperative", at most 72 characters, no full stop.

Only the first word tells an imperative from something else: "added", "adding" and "adds" are
refused. Merges and the commits before the rule (changes.BASE) are not looked at.
"""

import re
import sys
from pathlib import Path

from changes import BASE, subjects

COLUMNS = 72
SUBJECT = re.compile(r"[a-z][a-z0-9_./+, -]*: (?P<word>\S+).*")
# A vowel before "ed" and "ing", for "shed" and "bring" are verbs themselves; and so are those that
# end in "eed", "ss", "us", "as" and "is".
NOT_IMPERATIVE = re.compile(r"(?!embed$)[a-z]*[aeiouy][a-z]*(?:(?<!e)ed|ing)|[a-z]*[^suai]s")


def problems(subject: str) -> list[str]:
    """What is wrong with a subject."""
    found = []
    if len(subject) > COLUMNS:
        found.append(f"subject of {len(subject)} characters, allowed: {COLUMNS}")
    if subject.endswith("."):
        found.append("ends with a full stop, allowed: none")
    match = SUBJECT.fullmatch(subject)
    if match is None:
        found.append('not "area: imperative"')
    elif NOT_IMPERATIVE.fullmatch(match["word"].lower()):
        found.append(f'starts with "{match["word"]}", allowed: an imperative')
    return found


def main() -> int:
    commits = subjects(Path(__file__).resolve().parent.parent)
    if commits is None:
        print(f"commits: subjects NOT CHECKED: git or commit {BASE[:7]} is missing here")
        return 0
    found = [f'{commit}: {why}: "{subject}"' for commit, subject in commits
             for why in problems(subject)]  # fmt: skip
    print("\n".join(found) if found else f"commits: {len(commits)} subjects since {BASE[:7]}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
