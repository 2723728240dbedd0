"""Write image folders for three small hospitals, with one domain of digits-mini each, for the trial in docs/deploy.md.

python digits_mini_as_folders.py data

This writes data/hospital-1/pen/<class>/*.png, hospital-2/photo and hospital-3/print. Without a folder, nothing is kept.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from PIL import Image

from polyfed.data.sets.digits_mini import digits_mini

DOMAINS = ("pen", "photo", "print")
PER_DOMAIN = 200


def write_hospitals(folder: Path) -> dict[str, int]:
    """Write the training images of each domain, and return their numbers."""
    data = digits_mini(per_domain=PER_DOMAIN)
    counts = {}
    for number, name in enumerate(DOMAINS, start=1):
        images, labels = data.domain(name).train.batch(slice(None))
        root = folder / f"hospital-{number}" / name
        for place, (picture, label) in enumerate(zip(images.movedim(1, -1).numpy(), labels.tolist(), strict=True)):
            file = root / data.classes[label] / f"{place:04}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(picture).save(file)
        counts[str(root)] = len(labels)
    return counts


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        target = Path(sys.argv[1] if len(sys.argv) > 1 else scratch)
        for root, count in write_hospitals(target).items():
            print(f"{count} images in {root}")
    if len(sys.argv) == 1:
        print("Nothing was kept. Name a folder to keep them: python digits_mini_as_folders.py data")
