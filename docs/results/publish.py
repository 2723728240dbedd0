"""Copies pages that ``polyfed reproduce`` wrote, with their pictures, into docs/results/reproduced, where the index reads them.

Run: .venv/bin/python docs/results/publish.py OUT [EXPERIMENT ...]        (OUT as in ``polyfed reproduce --out OUT``; default: all in it)

Nothing is typed in and nothing is trained. A page that names a folder of this machine is refused.
"""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).parent / "reproduced"
PICTURE = re.compile(r"!\[[^\]]*\]\(([^)]+)\)")
OF_THIS_MACHINE = re.compile(r"(?<![\w.])/(?:work|home|root|tmp|Users)/\S*")


def publish(page: Path, name: str, to: Path = HERE) -> Path:
    """Copy one page and its pictures; the copy is returned."""
    text = page.read_text(encoding="utf-8")
    found = OF_THIS_MACHINE.search(text)
    if found:
        raise SystemExit(f"{page} names a folder of this machine, {found[0]}: publish a page without it.")
    copy = to / f"{name}.md"
    copy.parent.mkdir(parents=True, exist_ok=True)
    copy.write_text(text, encoding="utf-8")
    for picture in PICTURE.findall(text):
        shutil.copyfile(page.parent / picture, copy.parent / picture)
    return copy


def main(words: Sequence[str]) -> None:
    """Copy the pages of these experiments, or all."""
    out, wanted = Path(words[0]), set(words[1:])
    pages = {page.relative_to(out).with_suffix("").as_posix(): page for page in sorted(out.glob("*/*.md"))}
    missing = wanted - {name.removesuffix("-reduced") for name in pages}
    if missing:
        raise SystemExit(f"{out} has no page of {', '.join(sorted(missing))}.")
    for name, page in pages.items():
        if not wanted or name.removesuffix("-reduced") in wanted:
            print(publish(page, name))


if __name__ == "__main__":
    main(sys.argv[1:])
