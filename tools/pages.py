"""Rules for whole pages that a program can check: how long a page may be, words for which the field
has another one, and names of shapes."""

import re
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

import prose

# The first pattern that fits a page says how many lines it may have.
LINES = (
    ("README.md", 130),
    ("docs/getting-started.md", 120),
    ("docs/architecture.md", 120),
    ("docs/kernels/README.md", 80),
    ("docs/kernels/*.md", 60),
    ("docs/findings/*.md", 80),
    ("*.md", 400),
)
# Pages that no rule for prose or pages holds for, and why. At most ten.
EXEMPT = {
    "docs/findings/archive/*.md": "records of what was written then, which nobody rewrites",
}
GLOSSARY = "docs/glossary.md"  # its last table has the words, and what to write
SHAPES = "docs/performance.md"  # its first table has the names and sizes of shapes

NOT_BUT = re.compile(r"^\| ([^|]+) \| ([^|]+) \|$", re.MULTILINE)
SHAPE = re.compile(r"^\| (\S+B-n\d+) \| (\d+(?:, \d+){4}) \|", re.MULTILINE)
NAME = re.compile(r"(?<![\w.])\d+(?:\.\d+)?B-n\d+\b")
SIZES = re.compile(r"(?<![\d,] )(?<![\d,.])\d+(?:, ?\d+){4}(?!,? ?\d)")
LETTER = re.compile(r"(?<![\w.,])(?<!, )[A-Z] ?(?:=|\||:) ?\d+(?:, ?\d+){4}")


def exempt(name: str) -> bool:
    return any(fnmatch(name, pattern) for pattern in EXEMPT)


def banned(glossary: str) -> dict[str, str]:
    """What to write, by the word that is not to be written."""
    table = glossary[glossary.rindex("\n## ") :]
    rows = [match.groups() for match in NOT_BUT.finditer(table)]
    return {word: but for words, but in rows for word in words.split(", ") if words != "not"}


def shapes(text: str) -> dict[str, str]:
    """The names of shapes, by their sizes."""
    return {sizes: name for name, sizes in SHAPE.findall(text)}


def shown(text: str) -> str:
    """A page without code, comments and the targets of links, on as many lines."""
    text = prose.INLINE_CODE.sub(prose.blank, prose.without_fences(text))
    return prose.HIDDEN.sub(prose.blank, text)


def problems(root: Path, name: str) -> Iterator[tuple[int, str]]:
    """Line and message of everything in a page that breaks a rule."""
    text = (root / name).read_text()
    lines = len(text.splitlines())
    allowed = next(count for pattern, count in LINES if fnmatch(name, pattern))
    if lines > allowed:
        yield lines, f"{lines} lines, allowed: {allowed}"
    text = shown(text)

    def line(match: re.Match[str]) -> int:
        return text.count("\n", 0, match.start()) + 1

    if name != GLOSSARY and (root / GLOSSARY).is_file():
        for word, but in banned((root / GLOSSARY).read_text()).items():
            for match in re.finditer(rf"\b{re.escape(word)}s?\b", text, re.IGNORECASE):
                yield line(match), f'got "{match[0]}", allowed: "{but}"'
    for match in LETTER.finditer(text):
        yield line(match), f'got "{match[0]}", allowed: a name of {SHAPES}, or the sizes alone'
    if name != SHAPES and (root / SHAPES).is_file():
        named = shapes((root / SHAPES).read_text())
        for match in NAME.finditer(text):
            if match[0] not in named.values():
                yield line(match), f'got "{match[0]}", allowed: {", ".join(named.values())}'
        for match in SIZES.finditer(text):
            sizes = ", ".join(re.findall(r"\d+", match[0]))
            if sizes in named:
                yield line(match), f'got "{match[0]}", allowed: "{named[sizes]}"'
