"""Shell and Python blocks of pages."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

FENCE = re.compile(r"^```(?P<language>\w*)[^\n]*\n(?P<body>.*?)^```\s*$", re.DOTALL | re.MULTILINE)
HEADING = re.compile(r"^## (.+?)\s*$", re.MULTILINE)
SHELLS = ("sh", "bash", "console")
COMMAND = re.compile(r"^(\$ )?(polyfed|python|pip|make) ", re.MULTILINE)


@dataclass(frozen=True)
class Block:
    language: str
    """``sh`` or ``python``."""
    body: str
    section: str
    """The heading it stands below."""

    @property
    def lines(self) -> list[str]:
        """Commands of a shell block: a line that ends with a backslash goes on, and loops and lists stay whole."""
        text = self.body.replace("\\\n", " ").strip()
        if self.language == "python" or re.match(r"for |while |cat |mkdir ", text):
            return [text]
        return [line.strip().removeprefix("$ ") for line in text.splitlines() if line.strip() and not line.startswith("#")]


def blocks_of(page: Path) -> Iterator[Block]:
    """Blocks that somebody may copy and run; a block without a language counts when it holds commands."""
    text = page.read_text(encoding="utf-8")
    for found in FENCE.finditer(text):
        above = HEADING.findall(text[: found.start()])
        section = above[-1] if above else ""
        if found["language"] == "python":
            yield Block("python", found["body"], section)
        elif found["language"] in SHELLS or (not found["language"] and COMMAND.search(found["body"])):
            yield Block("sh", found["body"], section)
