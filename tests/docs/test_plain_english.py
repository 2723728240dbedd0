"""Plain English: phrases of patterns.txt in pages, docstrings, comments and messages, except those in allowed_phrases.txt."""

from __future__ import annotations

import io
import re
import subprocess
import tokenize
from collections.abc import Iterator
from pathlib import Path

from helpers.paths import ROOT

HERE = Path(__file__).resolve().parent
PROSE_TOKENS = (
    {tokenize.STRING, tokenize.COMMENT, tokenize.FSTRING_MIDDLE}
    if hasattr(tokenize, "FSTRING_MIDDLE")
    else {
        tokenize.STRING,
        tokenize.COMMENT,
    }
)


def patterns() -> list[tuple[re.Pattern[str], str]]:
    """Return each pattern with the advice in its comment."""
    lines = (line.partition("  #") for line in (HERE / "patterns.txt").read_text(encoding="utf-8").splitlines() if line.strip())
    return [(re.compile(expression), advice.strip()) for expression, _, advice in lines]


def allowed() -> list[list[str]]:
    """Return the entries of the allow-list: path, phrase, fragment of the line."""
    lines = (HERE / "allowed_phrases.txt").read_text(encoding="utf-8").splitlines()
    return [line.split("\t") for line in lines if line.strip() and not line.startswith("#")]


def files() -> list[Path]:
    """Return the pages, and the modules of the package."""
    wanted = ["README.md", "CONTRIBUTING.md", "docs/*.md", "src/polyfed/*.py"]
    found = subprocess.run(["git", "ls-files", *wanted], cwd=ROOT, capture_output=True, text=True, check=False).stdout.split()
    if not found:  # an unpacked archive
        found = [
            path.relative_to(ROOT).as_posix() for base in ("docs", "src/polyfed") for path in (ROOT / base).rglob("*.[mp][dy]")
        ]
    return [ROOT / name for name in found if (ROOT / name).is_file()]


def prose_of_python(text: str) -> Iterator[tuple[int, str]]:
    """Yield the lines of docstrings, comments and string literals with their numbers."""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in PROSE_TOKENS:
            for offset, line in enumerate(token.string.splitlines()):
                yield token.start[0] + offset, line


def prose(path: Path) -> Iterator[tuple[int, str]]:
    text = path.read_text(encoding="utf-8")
    return prose_of_python(text) if path.suffix == ".py" else iter(enumerate(text.splitlines(), start=1))


def findings() -> list[str]:
    """Return path:line, the phrase and the advice for each phrase that is not allowed."""
    known, exceptions = patterns(), allowed()
    any_of = re.compile("|".join(f"(?:{pattern.pattern})" for pattern, _ in known))
    found = []
    for path in files():
        name = path.relative_to(ROOT).as_posix()
        for number, line in prose(path):
            if not any_of.search(line):
                continue
            for pattern, advice in known:
                match = pattern.search(line)
                if match and not any(
                    place in ("*", name) and phrase in ("*", match[0]) and (fragment == "*" or fragment in line)
                    for place, phrase, fragment in exceptions
                ):
                    found.append(f"{name}:{number}: {match[0]!r}; {advice}")
    return found


def test_the_check_finds_phrases_in_prose_only() -> None:
    source = 'def told(x):\n    """Says what was said."""\n    nobody = f"is told {x}"  # mended\n    return nobody\n'
    assert [number for number, _ in prose_of_python(source)][:2] == [2, 3]
    lines = " ".join(line for _, line in prose_of_python(source))
    assert "mended" in lines and "return" not in lines
    assert all(advice for _, advice in patterns())


def test_pages_and_messages_are_in_plain_english() -> None:
    assert not findings()
