"""Make docs/gallery.md and its pictures: every kind of analysis once, on real images.

    python docs/gallery.py --root DATA

DATA holds pacs96.tar (or the PACS folder), its split lists, and digits5/*.npz. The runs are small on purpose: they show what an analysis
looks like, not how good a method is.
"""

from __future__ import annotations

import argparse
import dataclasses
import io
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import polyfed
from polyfed.core.data_types import DataSet
from polyfed.data.registry import data_sets
from polyfed.runs.result import Result
from polyfed.studies.analyse.kinds import KINDS, Analysis

HERE = Path(__file__).resolve().parent
PAGE, PICTURES = HERE / "gallery.md", HERE / "gallery"
PACS = {
    "data": "pacs(size=32)",
    "model": "small_cnn",
    "unseen": "photo",
    "rounds": 6,
    "local_steps": 10,
    "batch_size": 32,
    "lr": 0.05,
    "seed": 0,
}
DIGITS: dict[str, Any] = {"model": "small_cnn(width=8)", "rounds": 8, "lr": 0.05, "seed": 0}
TESTS = 300
STEPS, BATCHES = (1, 4), (8, 32)
SHOWN: Mapping[str, tuple[str, ...]] = {
    "norm-statistics": ("fedavg",),
    "norm-drift": ("fedavg",),
    "features": ("fedavg", "fedavg + group_norm"),
    "model-spread": ("local", "hfedf"),
    "alignment": ("hfedf",),
    "confidence": ("fedavg", "gperxan"),
    "tsne": ("fedavg", "gperxan"),
    "gradient-bias": ("fedavg", "fedavg + group_norm"),
    "union-statistics": ("fedavg",),
}
"""The runs on PACS that each kind looks at."""


def on_pacs(root: str, folder: Path) -> dict[str, Result]:
    """One run of each method, with photos unseen."""
    settings = {name: value for name, value in PACS.items() if name != "data"}
    methods = dict.fromkeys(method for many in SHOWN.values() for method in many)
    return {
        method: polyfed.run(PACS["data"], method, root=root, out=folder / str(number), **settings)
        for number, method in enumerate(methods)
    }


def on_digits(root: str) -> list[Result]:
    """Batch norm and group norm over a grid of steps and batch sizes, on Digits-Five with small test sets."""
    whole: DataSet = data_sets.build("digits-five(per_domain=743)", root=root)
    small = [dataclasses.replace(one, test=one.test.subset(order_of(len(one.test)))) for one in whole.domains]
    data = dataclasses.replace(whole, domains=tuple(small))
    return [
        polyfed.run(data, method, local_steps=steps, batch_size=batch, **DIGITS)
        for steps in STEPS
        for batch in BATCHES
        for method in ("fedavg", "fedavg + group_norm")
    ]


def order_of(count: int) -> Any:
    """Positions of the test images that are kept, evenly chosen."""
    import torch

    return torch.linspace(0, count - 1, TESTS).round().long()


def drawn(analysis: Analysis) -> list[tuple[str, str]]:
    """Write the pictures of an analysis; returns their names, each with a few words."""
    from PIL import Image

    written = []
    for name, figure in analysis.figures.items():
        file = io.BytesIO()
        figure.savefig(file, format="png", dpi=110)
        target = PICTURES / f"{analysis.kind}-{name}.png"
        Image.open(file).convert("RGB").quantize(96, dither=Image.Dither.NONE).save(target, optimize=True)
        written.append((target.name, name))
    return written


def wrapped(text: str) -> str:
    """Text in lines of at most 115 characters."""
    import textwrap

    return "\n".join(textwrap.wrap(text, 115, break_long_words=False, break_on_hyphens=False))


def section(analysis: Analysis, runs: str) -> str:
    """Return the section of one kind: what it shows, what was found, the figures."""
    pictures = "\n\n".join(f"![{words}](gallery/{name})" for name, words in drawn(analysis))
    what = wrapped(f"{KINDS[analysis.kind].what} Here: {runs}.")
    return f"## {analysis.title}\n\n{what}\n\n{wrapped(analysis.sentence)}\n\n{pictures}\n"


def page(sections: Sequence[str]) -> str:
    """The whole page."""
    settings = ", ".join(f"`{name}={value}`" for name, value in PACS.items())
    digits = ", ".join(f"`{name}={value}`" for name, value in DIGITS.items())
    head = [
        "# Gallery of analyses",
        wrapped(
            "See every kind of analysis on real images. [Analyses](analyses.md) explains how each is computed. "
            "Run all of them, to get figures, CSV and JSON:"
        ),
        "```sh\npolyfed analyse RUN...\n```",
        "Add `--kind NAME` for one kind, such as `norm-statistics`.",
        wrapped(
            "`python docs/gallery.py --root DATA` generates this page. The runs are small, a minute or less each on one core: they do not "
            "show how good a method is."
        ),
        wrapped(f"PACS: {settings}. Digits-Five: {digits}, 743 training and {TESTS} test images of each domain."),
    ]
    return "\n\n".join(head) + "\n\n" + "\n".join(sections)


def main() -> None:
    """Train, analyse, draw, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--root", required=True, help="folder of the data sets' files")
    root = parser.parse_args().root
    PICTURES.mkdir(exist_ok=True)
    sections = []
    with tempfile.TemporaryDirectory() as folder:
        runs = on_pacs(root, Path(folder))
        for kind, methods in SHOWN.items():
            found = polyfed.analyse([runs[method] for method in methods], kind)[kind]
            sections.append(section(found, f"{' and '.join(methods)} on PACS, photos unseen"))
            print(f"{kind}: {found.sentence}", flush=True)
    grid = polyfed.analyse(on_digits(root), "grid")["grid"]
    sections.append(section(grid, "fedavg and fedavg + group_norm on Digits-Five"))
    print(f"grid: {grid.sentence}", flush=True)
    PAGE.write_text(page(sections), encoding="utf-8")


if __name__ == "__main__":
    main()
