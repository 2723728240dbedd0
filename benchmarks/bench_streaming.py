"""Peak memory on a synthetic ImageNet of 50,000 images: of reading it, of a round of training on it, and of plain PyTorch's steps.

    python benchmarks/bench_streaming.py FOLDER [--images 50000] [--size 224] [--model resnet18]

The folder keeps the images (500 different ones under 50,000 names) and the decoded pixels, so a second call goes on where the first
was stopped. It needs 8 GB at 224 pixels. Each part is a process of its own, whose peak is the operating system's (VmHWM), libraries
included. The round is one of FixBN's Table 2: ResNet-18, batches of 20, SGD with momentum, 10 of 100 clients, three steps each instead
of two epochs, scored at the end on 1,000 images; freed memory is kept as the command line keeps it. Plain PyTorch trains the same network
on as large batches of noise by torch's own SGD, and scores as many images at once: what is left between the two is ours.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import torch
from PIL import Image

CLASSES, DIFFERENT, TESTED = 1000, 500, 1
BATCH, STEPS = 20, 3
SCORED_AT_ONCE = 47
"""Number of images of 224 pixels in our test batches, whose number of pixels is limited."""


def make(root: Path, images: int) -> None:
    """1,000 classes; each file is a hard link to one of the images."""
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
    """Return the peak memory of this process."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024 / 10**9


def read(given: argparse.Namespace) -> None:
    """Read every image twice: first decoded, then from the store."""
    from polyfed.data.registry import data_sets

    start = time.perf_counter()
    train = data_sets.build(f"imagenet(size={given.size})", root=str(given.folder)).domains[0].train
    print(f"found {len(train):,} training images in {time.perf_counter() - start:.1f} s, peak {peak_gb():.2f} GB", flush=True)
    for turn in ("first", "second"):
        start = time.process_time()
        for at in range(0, len(train), 64):
            train.batch(slice(at, at + 64))
        took = time.process_time() - start
        print(f"{turn} pass over all images: {took:.0f} processor seconds, peak {peak_gb():.2f} GB", flush=True)


def train(given: argparse.Namespace) -> None:
    """Run a round of an experiment."""
    import polyfed
    from polyfed.runs.malloc import keep_freed_pages

    keep_freed_pages()
    result = polyfed.run(
        f"imagenet(size={given.size})",
        root=str(given.folder),
        method="fedavg",
        model=given.model,
        partition='dirichlet(clients=100, alpha=0.1, rule="per_client")',
        clients_per_round=10,
        local_steps=STEPS,
        batch_size=BATCH,
        lr=0.1,
        momentum=0.9,
        weight_decay=1e-4,
        rounds=1,
    )
    print(f"a round of {given.model}: digest {result.digest[:12]}, peak {peak_gb():.2f} GB", flush=True)


def plain(given: argparse.Namespace) -> None:
    """Train the same network with the same batches in plain PyTorch, with our setting of the C library."""
    import torchvision

    from polyfed.runs.malloc import keep_freed_pages

    keep_freed_pages()
    model = getattr(torchvision.models, given.model)(num_classes=CLASSES)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    for _ in range(3 * STEPS):
        x, y = torch.rand(BATCH, 3, given.size, given.size), torch.randint(0, CLASSES, (BATCH,))
        loss = torch.nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    trained = peak_gb()
    with torch.no_grad():
        model.eval()(torch.rand(SCORED_AT_ONCE, 3, given.size, given.size))
    print(
        f"plain steps of {given.model}: peak {trained:.2f} GB, with {SCORED_AT_ONCE} images scored {peak_gb():.2f} GB", flush=True
    )


PARTS = {"read": read, "train": train, "plain": plain}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--images", type=int, default=50_000)
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--model", default="resnet18")
    parser.add_argument("--part", choices=PARTS, help="this part only, in this process")
    given = parser.parse_args()
    if given.part:
        torch.set_num_threads(1)
        PARTS[given.part](given)
        return
    make(given.folder, given.images)
    cache = {**os.environ, "POLYFED_CACHE": str(given.folder / "cache")}
    for part in PARTS:
        subprocess.run([sys.executable, *sys.argv, "--part", part], env=cache, check=True)


if __name__ == "__main__":
    main()
