"""Our augmentation of whole batches against kornia's and torchvision's, image by image: DomainBed's recipe on one thread.

    python benchmarks/bench_augment.py

Turns are taken so that all see the same machine; the figure is the median of processor seconds, which other processes move little.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from polyfed.data.augment import AUGMENTATIONS

SIZES, BATCH, TURNS = (32, 96, 224), 32, 7


def by_kornia(size: int) -> Callable[[Tensor], Tensor]:
    import kornia.augmentation as augmentation

    steps = augmentation.AugmentationSequential(
        augmentation.RandomResizedCrop((size, size), scale=(0.7, 1.0), cropping_mode="resample"),
        augmentation.RandomHorizontalFlip(),
        augmentation.ColorJitter(0.3, 0.3, 0.3, 0.3, p=1.0),
        augmentation.RandomGrayscale(p=0.1),
    )
    return lambda x: (steps(x.float() / 255) * 255).round().clamp(0, 255).to(torch.uint8)


def by_torchvision(size: int) -> Callable[[Tensor], Tensor]:
    from torchvision.transforms import v2

    steps = v2.Compose(
        [
            v2.RandomResizedCrop(size, scale=(0.7, 1.0)),
            v2.RandomHorizontalFlip(),
            v2.ColorJitter(0.3, 0.3, 0.3, 0.3),
            v2.RandomGrayscale(0.1),
        ]
    )
    return lambda x: torch.stack([steps(image) for image in x])


def seconds(work: Callable[[Tensor], Tensor], x: Tensor) -> float:
    start = time.process_time()
    work(x)
    return time.process_time() - start


def main() -> None:
    torch.set_num_threads(1)
    print("| pixels | ours, ms a batch of 32 | kornia | torchvision, image by image |\n|---|---|---|---|")
    for size in SIZES:
        x = torch.randint(0, 256, (BATCH, 3, size, size), dtype=torch.uint8)
        contenders = [AUGMENTATIONS["domainbed"], by_kornia(size), by_torchvision(size)]
        for work in contenders:
            work(x)
        taken = [[seconds(work, x) for work in contenders] for _ in range(TURNS)]
        medians = [statistics.median(times) * 1000 for times in zip(*taken, strict=True)]
        print(f"| {size} | " + " | ".join(f"{median:.1f}" for median in medians) + " |", flush=True)


if __name__ == "__main__":
    main()
