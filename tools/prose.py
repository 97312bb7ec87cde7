"""The rules for prose in Markdown that a program can check.

A sentence has at most 35 words and two figures; a line has at most 100 columns. Tables, code, HTML
comments and headings are exempt, and so is a long line that is one link or address.

A word is what stands between spaces and has a letter or a digit; `inline code` is one word. A
sentence ends at a full stop, an exclamation or question mark, or where its paragraph or list item
ends. A colon or a semicolon does not end it.

A figure is a word that starts with a digit, after a sign or an opening bracket at most. These are
no figures:
- what stands in `inline code` or in the target of a link;
- a number directly after a name, which is a word with a capital letter other than the sentence's
  first: "PyTorch 2.11";
- digits directly followed by a letter other than x, a name or a term: "7B-n256", "4TKn".
A shape is one figure: "24576,1536,256,128,8", "128 x 256".
"""

import re
from collections.abc import Iterator

WORDS = 35
FIGURES = 2
COLUMNS = 100

INLINE_CODE = re.compile(r"(`+)(?!`).+?(?<!`)\1(?!`)", re.DOTALL)
HIDDEN = re.compile(r"\]\([^)]*\)|\]\[[^\]]*\]|</?[A-Za-z][^<>\n]*>")  # targets, tags
ITEM = re.compile(r"\s*(?:>\s*)*(?:[-*+]|\d+[.)])\s+")
BREAK = re.compile(r"\s*(?:\||#{1,6}\s|[-=*_]{3,}\s*$|\[[^\]]+\]:)|\s*(?:>\s*)*$")
ALONE = re.compile(r"\s*(?:(?:[-*+>]|\d+[.)]|\[[^\]]+\]:)\s+)*\S+\s*")
END = re.compile(r"(?<!\.)[.!?][*_)\]\"']*(?=\s)")
ABBREVIATION = re.compile(r"(?:\b(?:e\.g|i\.e|cf|vs|Fig|Sec|Eq|approx))\.$")
SHAPE = re.compile(r"(?<=\d) [x×] (?=\d)")
FIGURE = re.compile(r"[(\[*\"']*[-+~±−<>≤≥]?(?>\d+(?:[.,]\d+)*)(?![A-Za-wyz])")


def blank(match: re.Match[str]) -> str:
    """Spaces in place of what was matched, on as many lines."""
    return re.sub(r"[^\n]", " ", match[0])


def without_fences(text: str) -> str:
    """Blanks fenced code and HTML comments, keeping the line numbers."""
    text = re.sub(r"^( *)(```+|~~~+).*?^ *\2 *$", blank, text, flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"<!--.*?-->", blank, text, flags=re.DOTALL)


def without_blocks(text: str) -> str:
    """Blanks indented code as well."""
    text = without_fences(text)
    lines, code, item, before = text.split("\n"), False, False, ""
    for i, line in enumerate(lines):
        if line.strip():
            code = line.startswith("    ") and (code or not before.strip()) and not item
            item = bool(ITEM.match(line)) or (item and (line[0] == " " or bool(before.strip())))
        before = line
        if code:
            lines[i] = ""
    return "\n".join(lines)


def blocks(lines: list[str]) -> Iterator[tuple[int, str]]:
    """Paragraphs and list items, each with the number of its first line."""
    first = 0
    block: list[str] = []
    for number, line in enumerate([*lines, ""], 1):
        ends, item = BREAK.match(line), ITEM.match(line)
        if block and (ends or item):
            yield first, "\n".join(block)
            block = []
        if ends:
            continue
        if not block:
            first = number
        block.append(" " * item.end() + line[item.end() :] if item else re.sub("^ *>", " ", line))


def sentences(block: str) -> Iterator[tuple[int, str]]:
    """Sentences with code and targets masked, each with where it starts in its block."""
    block = INLINE_CODE.sub(lambda match: "c" * len(match[0]), block)
    block = HIDDEN.sub(lambda match: " " * len(match[0]), block)
    start = 0
    for end in [match.end() for match in END.finditer(block)] + [len(block)]:
        if end < len(block) and ABBREVIATION.search(block[start:end]):
            continue
        sentence = block[start:end]
        if sentence.strip():
            yield start + len(sentence) - len(sentence.lstrip()), sentence
        start = end


def figures(words: list[str]) -> list[str]:
    """The words of a sentence that are figures."""
    return [
        word
        for i, word in enumerate(words)
        if FIGURE.match(word) and not (i > 1 and re.search("[A-Z]", words[i - 1]))
    ]


def problems(text: str) -> list[tuple[int, str]]:
    """Line and message of everything in a Markdown text that breaks a rule."""
    found = []
    lines = [line.rstrip() for line in without_blocks(text).split("\n")]
    for number, line in enumerate(lines, 1):
        if len(line) > COLUMNS and not line.lstrip().startswith("|") and not ALONE.fullmatch(line):
            found.append((number, f"{len(line)} columns, allowed: {COLUMNS}"))
    for first, block in blocks(lines):
        for start, sentence in sentences(block):
            line = first + block.count("\n", 0, start)
            words = [w for w in SHAPE.sub("x", sentence).split() if re.search(r"\w", w)]
            excerpt = " ".join(block[start : start + len(sentence.lstrip())].split()[:8])
            if len(words) > WORDS:
                why = f"sentence of {len(words)} words, allowed: {WORDS}"
                found.append((line, f'{why}: "{excerpt}..."'))
            if (count := len(figures(words))) > FIGURES:
                why = f"{count} figures in a sentence, allowed: {FIGURES} (use a table)"
                found.append((line, f'{why}: "{excerpt}..."'))
    return sorted(found)
