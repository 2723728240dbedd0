"""What mkdocs cannot know: the pages of all methods, CHANGELOG.md, and files outside docs/ that pages link to, as pages of the site."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
CHANGES = "changes.md"
LINKED = "linked"
LINK = re.compile(r"(?P<start>\[[^\]]*\]\()(?P<target>[^)#\s]+)(?P<anchor>#[^)\s]*)?\)")
FENCE = re.compile(r"^```.*?^```\s*$", re.DOTALL | re.MULTILINE)


def on_config(config: Any) -> Any:
    """Fill the placeholders of the navigation."""
    found = {
        "METHODS": sorted(f"methods/{page.name}" for page in (DOCS / "methods").glob("*.md") if page.name != "index.md"),
        "CHANGES": CHANGES,
        "LINKED": [linked_name(file) for file in linked_files()],
    }
    found["METHODS"] = ["methods/index.md", *found["METHODS"]]
    config.nav = [filled(item, found) for item in config.nav]
    return config


def filled(item: Any, found: dict[str, Any]) -> Any:
    """An entry of the navigation with its placeholders replaced."""
    if isinstance(item, dict):
        return {title: filled(inner, found) for title, inner in item.items()}
    if isinstance(item, list):
        return [filled(each, found) for each in item]
    return found.get(item, item)


def on_files(files: Files, config: Any) -> Files:
    """Add pages that do not lie in docs/."""
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    files.append(File.generated(config, CHANGES, content=changes))
    for file in linked_files():
        files.append(File.generated(config, linked_name(file), content=as_page(file)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Lead links that leave docs/ to the pages made of their targets."""
    source = page.file.src_uri
    if source == CHANGES or source.startswith(f"{LINKED}/"):
        return LINK.sub(lambda match: led_nowhere(match, source), markdown)

    def led(match: re.Match[str]) -> str:
        outside = outside_docs(DOCS / source, match["target"])
        if outside is None:
            return match[0]
        return f"{match['start']}{posixpath.relpath(linked_name(outside), posixpath.dirname(source))})"

    return LINK.sub(led, markdown)


def led_nowhere(match: re.Match[str], source: str) -> str:
    """A link of a file from elsewhere: into docs/ if it leads there, else its text alone."""
    target = match["target"]
    if re.match(r"[a-z]+:", target):
        return match[0]
    home = ROOT / source.removeprefix(f"{LINKED}/") if source != CHANGES else ROOT / "CHANGELOG.md"
    found = (home.parent / target).resolve()
    if found.is_relative_to(DOCS) and found.suffix == ".md":
        return f"{match['start']}{posixpath.relpath(found.relative_to(DOCS).as_posix(), posixpath.dirname(source))}{match['anchor'] or ''})"
    return match["start"][1:-2]


def linked_files() -> list[Path]:
    """Files outside docs/ that pages link to."""
    found = set()
    for page in DOCS.rglob("*.md"):
        text = FENCE.sub("", page.read_text(encoding="utf-8"))
        found |= {outside_docs(page, match["target"]) for match in LINK.finditer(text)} - {None}
    return sorted(file for file in found if file is not None)


def outside_docs(page: Path, target: str) -> Path | None:
    """The file that a link leads to, if it exists and is not in docs/."""
    if re.match(r"[a-z]+:", target):
        return None
    found = (page.parent / target).resolve()
    return found if found.is_file() and found.is_relative_to(ROOT) and not found.is_relative_to(DOCS) else None


def linked_name(file: Path) -> str:
    """The page that is made of a file."""
    name = file.relative_to(ROOT).as_posix()
    return f"{LINKED}/{name}" if file.suffix == ".md" else f"{LINKED}/{name}.md"


def as_page(file: Path) -> str:
    """A file as Markdown: code is shown with its path."""
    text = file.read_text(encoding="utf-8")
    if file.suffix == ".md":
        return text
    return f"# {file.name}\n\n`{file.relative_to(ROOT).as_posix()}`\n\n```{file.suffix.lstrip('.').replace('py', 'python')}\n{text}```\n"
