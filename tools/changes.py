"""The commits since the rule for their subjects began, as far as git can tell."""

import subprocess
from pathlib import Path

# The last commit before the rule. Everything after it is held to it.
BASE = "a60a8f827352a1f7e69f664b3f6700afce24189d"


def git(root: Path, *args: str) -> str | None:
    """The output of a git command; None when git, the repository or a named commit is missing."""
    try:
        done = subprocess.run(["git", "-C", str(root), *args], capture_output=True, text=True)
    except OSError:
        return None
    return done.stdout if done.returncode == 0 else None


def subjects(root: Path, base: str = BASE) -> list[tuple[str, str]] | None:
    """Short id and subject of every commit after `base` that is no merge; None without history."""
    log = git(root, "log", "--no-merges", "--format=%h %s", f"{base}..HEAD")
    if log is None:
        return None
    return [(line.split(" ", 1)[0], line.split(" ", 1)[1]) for line in log.splitlines()]
