"""Peak memory on a synthetic ImageNet of 50,000 images: every image is decoded, then one round is trained on what is on disk.

    python benchmarks/bench_streaming.py FOLDER [--images 50000] [--size 224]

The folder keeps the images (500 different ones under 50,000 names) and the decoded pixels, so a second call goes on where the first
was stopped. It needs 8 GB at 224 pixels. The peak is that of the process itself, from the operating system. The round is tested in
batches of 32: of the usual 256 images of this size, one map of MobileNetV2 (96 channels, 112x112) alone has 1.2 GB.
"""

from __future__ import annotations

import argparse
import os
import resource
import time
from pathlib import Path

import numpy as np
import torch
from PIL import Image

CLASSES, DIFFERENT, TESTED = 1000, 500, 1
TEST_BATCH = 32


def make(root: Path, images: int) -> None:
    """1,000 classes; each file is a hard link to one of the pictures."""
    if (root / "made").exists():
        return
    random = np.random.default_rng(0)
    originals = root / "originals"
    originals.mkdir(parents=True, exist_ok=True)
    for number in range(DIFFERENT):
        coarse = random.integers(0, 256, (24, 32, 3), np.uint8)
        Image.fromarray(coarse).resize((320, 240), Image.Resampling.BICUBIC).save(originals / f"{number}.jpg", quality=85)
    for label in range(CLASSES):
        for split, count in (("train", images // CLASSES), ("val", TESTED)):
            folder = root / "imagenet" / split / f"n{label:08d}"
            folder.mkdir(parents=True, exist_ok=True)
            for number in range(count):
                target = folder / f"{number}.JPEG"
                if not target.exists():
                    os.link(originals / f"{(label * 7 + number) % DIFFERENT}.jpg", target)
    (root / "made").touch()


def peak_gb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 10**9


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--images", type=int, default=50_000)
    parser.add_argument("--size", type=int, default=224)
    given = parser.parse_args()
    torch.set_num_threads(1)
    make(given.folder, given.images)
    os.environ["POLYFED_CACHE"] = str(given.folder / "cache")

    import polyfed
    from polyfed.data.registry import data_sets

    text = f"imagenet(size={given.size})"
    start = time.perf_counter()
    data = data_sets.build(text, root=str(given.folder))
    print(
        f"found {len(data.domains[0].train):,} training images in {time.perf_counter() - start:.1f} s, peak {peak_gb():.2f} GB",
        flush=True,
    )
    for turn in ("first", "second"):
        start, train = time.process_time(), data.domains[0].train
        for at in range(0, len(train), 64):
            train.batch(slice(at, at + 64))
        took = time.process_time() - start
        print(f"{turn} pass over all images: {took:.0f} processor seconds, peak {peak_gb():.2f} GB", flush=True)
    result = polyfed.run(
        text,
        root=str(given.folder),
        method="fedavg",
        model="mobilenet_v2",
        partition="dirichlet(clients=100, alpha=0.1)",
        clients_per_round=2,
        local_steps=1,
        batch_size=20,
        test_batch_size=TEST_BATCH,
        rounds=1,
    )
    print(f"one round of fedavg with 2 of 100 clients: digest {result.digest[:12]}, peak {peak_gb():.2f} GB")


if __name__ == "__main__":
    main()
