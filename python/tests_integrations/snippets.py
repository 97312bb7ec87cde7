"""The Python blocks of docs/frameworks.md."""

import re
from pathlib import Path

_PAGE = Path(__file__).parents[2] / "docs" / "frameworks.md"


def of_section(title: str) -> list[str]:
    """The blocks of a section, in order."""
    section = _PAGE.read_text().split(f"\n## {title}\n")[1].split("\n## ")[0]
    return re.findall(r"^```python\n(.*?)^```", section, re.MULTILINE | re.DOTALL)
