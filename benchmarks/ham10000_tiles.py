"""HAM10000 as a folder of images by domain and class, cut from the mosaics of ham10000_64.tar.

python benchmarks/ham10000_tiles.py ham10000_64.tar OUT [MOST]     at most MOST images of each domain, the first of the index
"""

from __future__ import annotations

import csv
import io
import sys
import tarfile
from pathlib import Path

from PIL import Image

SIDE = 64
CLASSES = ("bkl", "mel", "nv")
"""Those that all four domains have in number; a folder of images needs every class in every domain."""


def main(archive: str, out: str, most: str = "1000000") -> None:
    with tarfile.open(archive) as tar:
        index = tar.extractfile("ham10000/index.csv")
        assert index is not None
        rows = list(csv.DictReader(io.TextIOWrapper(index)))
        for domain in sorted({row["domain"] for row in rows}):
            file = tar.extractfile(f"ham10000/{domain}.jpg")
            assert file is not None
            mosaic = Image.open(file).convert("RGB")
            across = mosaic.width // SIDE
            for row in [row for row in rows if row["domain"] == domain and row["dx"] in CLASSES][: int(most)]:
                tile = int(row["tile"])
                x, y = SIDE * (tile % across), SIDE * (tile // across)
                folder = Path(out) / domain / row["dx"]
                folder.mkdir(parents=True, exist_ok=True)
                mosaic.crop((x, y, x + SIDE, y + SIDE)).save(folder / f"{tile}.png")


if __name__ == "__main__":
    main(*sys.argv[1:])
