"""What changed since the rules for prose and commit subjects began, as far as git can tell."""

import re
import subprocess
from pathlib import Path

# The last commit before the rules. Everything after it is held to them, so the set of checked
# documents and subjects only grows.
BASE = "a60a8f827352a1f7e69f664b3f6700afce24189d"


def git(root: Path, *args: str) -> str | None:
    """The output of a git command; None when git, the repository or a named commit is missing."""
    try:
        done = subprocess.run(["git", "-C", str(root), *args], capture_output=True, text=True)
    except OSError:
        return None
    return done.stdout if done.returncode == 0 else None


def touched_documents(root: Path, base: str = BASE) -> list[Path] | None:
    """Markdown files of the working tree that differ from `base`, untracked ones included; None
    without history. Left out are a page of findings that only moved, and pages in which nothing
    differs but digits, as after tools/figures.py, and names of files, as after a move."""
    new = git(root, "ls-files", "-z", "--others", "--exclude-standard", "--", "*.md")
    changed = git(root, "diff", "-z", "--relative", "--name-status", "--find-renames=100%",
                  "--diff-filter=d", base, "--", "*.md")  # fmt: skip
    if new is None or changed is None:
        return None
    names = {name for name in new.split("\0") if name}
    fields = iter(changed.split("\0"))
    for status in fields:
        if status.startswith("R"):
            next(fields)
        name = next(fields, "")
        if name and not (status.startswith("R") and name.startswith("docs/findings/")):
            names.add(name)
    return sorted(root / name for name in names if not same_words(root, name, base))


# `a/b.h`, [b.h](../a/b.h), [log](b.log)
NAME_OF_FILE = re.compile(r"\]\([\w./-]+\)|[\w./-]+\.[a-z]+\b")


def same_words(root: Path, name: str, base: str) -> bool:
    """Does a page differ from `base` in nothing but digits and names of files?"""
    before = git(root, "show", f"{base}:./{name}")
    words = [re.sub(r"[\d.]+", "0", NAME_OF_FILE.sub("file", text)).split() for text in
             (before or "", (root / name).read_text())]  # fmt: skip
    return before is not None and words[0] == words[1]


def subjects(root: Path, base: str = BASE) -> list[tuple[str, str]] | None:
    """Short id and subject of every commit after `base` that is no merge; None without history."""
    log = git(root, "log", "--no-merges", "--format=%h %s", f"{base}..HEAD")
    if log is None:
        return None
    return [(line.split(" ", 1)[0], line.split(" ", 1)[1]) for line in log.splitlines()]
