"""However many rounds and epochs there are, an image file is decoded once; another run decodes nothing."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import polyfed
from polyfed.data.registry import data_sets
from polyfed.data.store import images

RANDOM = np.random.default_rng(0)


@pytest.fixture
def decodings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Counter[str]:
    """Count how often each file is decoded, with a separate cache."""
    monkeypatch.setenv("POLYFED_CACHE", str(tmp_path / "cache"))
    counted: Counter[str] = Counter()
    decoded = images.decoded

    def counting(content: bytes, name: str) -> Any:
        counted[name] += 1
        return decoded(content, name)

    monkeypatch.setattr(images, "decoded", counting)
    return counted


def save(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(RANDOM.integers(0, 256, (20, 24, 3), np.uint8)).save(path)


@pytest.mark.parametrize("rounds", [1, 3])
def test_images_of_a_folder(decodings: Counter[str], tmp_path: Path, rounds: int) -> None:
    names = [f"{domain}/{label}/{n}.jpg" for domain in ("a", "b") for label in ("x", "y") for n in range(6)]
    for name in names:
        save(tmp_path / "own" / name)
    text = f'image_folder(root="{tmp_path / "own"}", size=16)'
    polyfed.run(text, "fedavg", rounds=rounds, local_epochs=2, batch_size=4)
    assert decodings == dict.fromkeys(names, 1)
    polyfed.run(text, "fedbn", rounds=1, batch_size=4)
    assert decodings == dict.fromkeys(names, 1), "the second run finds them decoded"


def test_images_that_are_streamed(decodings: Counter[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = tmp_path / "camelyon17_v1.0"
    lines = [",patient,node,x_coord,y_coord,tumor,slide,center,split"]
    for center in range(5):
        slide = f"patient_{center * 20:03d}_node_1"
        for patch in range(10):
            save(base / "patches" / slide / f"patch_{slide}_x_{patch}_y_7.png")
            lines.append(f"{len(lines)},{center * 20:03d},1,{patch},7,{patch % 2},0,{center},0")
    (base / "metadata.csv").write_text("\n".join(lines))
    data_sets.build("camelyon17(size=16)", root=str(tmp_path))
    assert not decodings, "nothing is decoded before it is needed"
    for _ in range(2):
        polyfed.run("camelyon17(size=16)", root=str(tmp_path), model="small_cnn", rounds=2, local_epochs=2, batch_size=4)
        assert max(decodings.values()) == 1 and len(decodings) >= 45
