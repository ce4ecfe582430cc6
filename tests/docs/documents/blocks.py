"""The code blocks of a Markdown file."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from markdown_it import MarkdownIt

ROOT = Path(__file__).resolve().parents[3]

#: The comment before a block that is shown and not run.
_NOT_RUN = re.compile(r"<!-- not run: (.+?) -->")
_TITLE = re.compile(r'title="([^"]+)"')


@dataclass(frozen=True)
class Block:
    path: Path
    #: Line of the fence, from 1.
    line: int
    language: str
    #: The file that the block is, as in ```python title="app.py"; "" for one that is only run.
    title: str
    text: str
    #: Why it is not run; "" for one that is.
    not_run: str

    @property
    def place(self) -> str:
        return f"{self.path.relative_to(ROOT)}:{self.line}"

    @property
    def first_line(self) -> str:
        return self.text.strip().splitlines()[0]


def pages() -> list[Path]:
    """Every Markdown file that a reader meets."""
    found = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")]
    return sorted(path for path in found if not any(part.startswith(".") for part in path.relative_to(ROOT).parts))


def blocks(path: Path) -> list[Block]:
    found = []
    reason = ""
    for token in MarkdownIt("commonmark").parse(path.read_text()):
        if token.type == "fence":
            language, _, rest = token.info.strip().partition(" ")
            title = _TITLE.search(rest)
            assert token.map is not None
            found.append(
                Block(path, token.map[0] + 1, language, title[1] if title else "", token.content, not_run=reason)
            )
        elif token.type == "code_block":
            raise AssertionError(f"{path}: an indented code block; give it a fence and a language")
        if token.type == "html_block":
            marker = _NOT_RUN.search(token.content)
            reason = marker[1] if marker else ""
        elif token.level == 0:
            reason = ""
    return found
