"""The site: it is built strictly, every page is at most two clicks from the start, nothing is loaded from elsewhere, search works offline."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlparse

import pytest

from helpers.paths import DOCS, ROOT, SOURCE

pytest.importorskip("mkdocs", reason="needs mkdocs: pip install 'polyfed[docs]'")
pytest.importorskip("mkdocstrings", reason="needs mkdocstrings: pip install 'polyfed[docs]'")
pytestmark = pytest.mark.slow

CLICKS = 2
LOADS = {"script": "src", "img": "src", "link": "href", "iframe": "src", "source": "src"}


class Page(HTMLParser):
    """Return the links and the loaded files of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        if tag == "a" and values.get("href"):
            self.links.append(str(values["href"]))
        loaded = values.get(LOADS.get(tag, ""))
        if loaded and values.get("rel") not in ("canonical", "next", "prev"):
            self.loads.append(loaded)


def built(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(SOURCE), "NO_MKDOCS_2_WARNING": "1"}
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder), *options]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site that ``make docs`` has built, or one that is built here."""
    if "POLYFED_SITE" in os.environ:
        return (ROOT / os.environ["POLYFED_SITE"]).resolve()
    folder = tmp_path_factory.mktemp("site")
    ended = built(folder)
    assert ended.returncode == 0, ended.stderr
    return folder


def linked_from(page: Path) -> Iterator[Path]:
    for link in Page(page.read_text(encoding="utf-8")).links:
        parts = urlparse(link)
        if not parts.scheme and parts.path:
            yield (page.parent / unquote(parts.path)).resolve()


def test_every_page_is_two_clicks_from_the_start(site: Path) -> None:
    reached = {site / "index.html"}
    for _ in range(CLICKS):
        reached |= {target for page in reached if page.suffix == ".html" for target in linked_from(page)}
    pages = {page for page in site.rglob("*.html") if page.name != "404.html"}
    assert not pages - reached, sorted(page.relative_to(site).as_posix() for page in pages - reached)
    for source in DOCS.rglob("*.md"):
        assert (site / source.relative_to(DOCS).with_suffix(".html")).is_file(), source


def test_all_links_and_loads_lead_to_files_of_the_site(site: Path) -> None:
    for page in site.rglob("*.html"):
        if page.name == "404.html":
            continue
        for link in Page(page.read_text(encoding="utf-8")).loads:
            parts = urlparse(link)
            assert not parts.scheme and not parts.netloc, f"{page.name} loads {link}"
            assert (page.parent / unquote(parts.path)).exists(), f"{page.name} loads {link}"
        gone = [str(target) for target in linked_from(page) if not target.exists()]
        assert not gone, f"{page.relative_to(site)} links to {gone}"
    for style in site.rglob("*.css"):
        assert not re.search(r"url\(['\"]?https?:|@import", style.read_text(encoding="utf-8")), style


def test_the_navigation_has_what_a_reader_looks_for(site: Path) -> None:
    start = (site / "index.html").read_text(encoding="utf-8")
    for tab in ("Get started", "Use", "Methods and results", "Build"):
        assert re.search(rf">\s*{tab}\s*<", start), tab
    tutorials = {
        target.relative_to(site).as_posix()
        for target in linked_from(site / "tutorials" / "first-run.html")
        if target.suffix == ".html"
    }
    assert {
        "tutorials/first-run.html",
        "tutorials/hospital-images.html",
        "tutorials/own-method.html",
        "tutorials/three-nodes.html",
        "tutorials/read-a-report.html",
        "tutorials/choose-with-the-doctor.html",
    } <= tutorials


def test_the_reference_has_every_public_name_and_option(site: Path) -> None:
    import polyfed
    from polyfed.settings import setting_names

    python = (site / "reference" / "python.html").read_text(encoding="utf-8")
    missing = [name for name in polyfed.__all__ if f'.{name}"' not in python]
    assert not missing
    commands = (site / "reference" / "command-line.html").read_text(encoding="utf-8")
    assert all(f"--{name.replace('_', '-')}" in commands for name in setting_names() if name != "data")


@pytest.mark.chromium
def test_search_works_from_a_folder(site: Path, tmp_path: Path, chromium: Path) -> None:
    command = [
        str(chromium),
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--virtual-time-budget=20000",
        "--window-size=1280,900",
    ]
    address = f"{(site / 'index.html').as_uri()}?q=newcomer"
    options = [f"--user-data-dir={tmp_path}", "--host-resolver-rules=MAP * ~NOTFOUND", "--dump-dom"]
    shown = subprocess.run([*command, *options, address], capture_output=True, text=True, check=False, timeout=300).stdout
    found = re.search(r"(\d+) matching documents", shown)
    assert found is not None and int(found[1]) > 5


def test_a_broken_link_stops_the_build(tmp_path: Path) -> None:
    page = tmp_path / "docs" / "index.md"
    page.parent.mkdir()
    page.write_text("# Start\n\n[gone](gone.md)\n", encoding="utf-8")
    rules = re.search(r"^validation:\n(?:  .*\n)+", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE)
    assert rules is not None
    config = tmp_path / "mkdocs.yml"
    config.write_text(f"site_name: broken\n{rules[0]}", encoding="utf-8")
    ended = built(tmp_path / "out", "--config-file", str(config))
    assert ended.returncode != 0 and "gone.md" in ended.stderr + ended.stdout
