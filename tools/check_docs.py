#!/usr/bin/env python3
"""Checks that documents point at things that exist: relative links and their #anchors in every
Markdown file, files of this tree named in `code`, and documents named in source comments. Every
document is also held to the rules for prose (prose.py) and for pages (pages.py)."""

import re
import sys
from pathlib import Path

import pages
import prose

SKIP = re.compile(r"^(\..*|build.*|__pycache__|node_modules)$")
CODE_DIRS = (
    "benchmarks",
    "cli",
    "cmake",
    "demo",
    "docs",
    "examples",
    "include",
    "python",
    "src",
    "testkit",
    "tests",
    "tools",
)
SOURCES = {".h", ".cuh", ".cpp", ".cu", ".py", ".sh", ".cmake", ".txt"}
LINK = re.compile(r"\[(?:[^\[\]]|\[[^\]]*\])*\]\(\s*<?([^)\s>]+)>?(?:\s+\"[^\"]*\")?\s*\)")
DEFINITION = re.compile(r"^ {0,3}\[[^\]]+\]:\s*<?(\S+?)>?(?:\s|$)", re.MULTILINE)
HTML = re.compile(r"<(?:img|a)\b[^>]*?\b(?:src|href)=\"([^\"]+)\"")
NAMED = re.compile(rf"`((?:{'|'.join(CODE_DIRS)})/[\w./-]+\.\w+)(?::\d+)?`")
COMMENT = re.compile(r"\b(docs/[\w/-]+\.md(?:#[\w-]+)?)")


def files(root):
    for path in sorted(root.iterdir()):
        if SKIP.match(path.name):
            continue
        if path.is_dir():
            yield from files(path)
        else:
            yield path


def without_code(text, inline):
    """Blanks fenced code (and inline code), keeping the line numbers."""
    text = prose.without_fences(text)
    return re.sub(r"(`+)(?!`).+?(?<!`)\1(?!`)", prose.blank, text) if inline else text


def anchors(path):
    """The #names of a Markdown file's headings, by GitHub's rule."""
    names: set[str] = set()
    seen: dict[str, int] = {}
    text = without_code(path.read_text(), inline=False)
    for title in re.findall(r"^ {0,3}#{1,6}\s+(.*?)\s*#*\s*$", text, re.MULTILINE):
        title = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title).replace("`", "").lower()
        slug = re.sub(r"[^\w\- ]", "", title).replace(" ", "-")
        count = seen[slug] = seen.get(slug, -1) + 1
        names.add(f"{slug}-{count}" if count else slug)
    names.update(re.findall(r"<a\s+(?:id|name)=\"([^\"]+)\"", text))
    return names


def dead(root, base, target):
    """Why a link from a file in `base` leads nowhere; None when it does not."""
    name, _, anchor = target.partition("#")
    path = base / name
    if not path.resolve().is_relative_to(root):
        return "leaves the repository"
    if not path.exists():
        return "no such file"
    if anchor and path.suffix == ".md" and anchor not in anchors(path.resolve()):
        return "no such heading"
    return None


def check(root):
    root = Path(root).resolve()
    documents, problems = 0, []

    def report(path, text, match, why):
        line = text.count("\n", 0, match.start(1)) + 1
        problems.append(f"{path.relative_to(root)}:{line}: {match[1]}: {why}")

    for path in files(root):
        if path.suffix == ".md":
            documents += 1
            text = path.read_text()
            prose = without_code(text, inline=True)
            for match in [m for kind in (LINK, DEFINITION, HTML) for m in kind.finditer(prose)]:
                target = match[1]
                if re.match(r"[a-z][a-z0-9+.-]*:", target):
                    continue  # another site
                if target.startswith("#"):
                    target = path.name + target
                if why := dead(root, path.parent, target):
                    report(path, text, match, why)
            for match in NAMED.finditer(without_code(text, inline=False)):
                if not (root / match[1]).exists():
                    report(path, text, match, "no such file")
        elif path.suffix in SOURCES and "tests" not in path.parts:
            text = path.read_text()
            for match in COMMENT.finditer(text):
                if why := dead(root, root, match[1]):
                    report(path, text, match, why)
    return documents, problems


def check_prose(root: Path) -> list[str]:
    """Every breach of the rules for prose and pages."""
    names = [str(path.relative_to(root)) for path in files(root) if path.suffix == ".md"]
    return [
        f"{name}:{line}: {why}"
        for name in names
        if not pages.exempt(name)
        for line, why in [*prose.problems((root / name).read_text()), *pages.problems(root, name)]
    ]


def main() -> int:
    root = Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parent.parent).resolve()
    documents, problems = check(root)
    problems += check_prose(root)
    print("\n".join(problems or [f"docs: {documents} documents, links, prose and pages"]))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
