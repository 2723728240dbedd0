"""Our batch augmentations compared with kornia's and, for DomainBed's recipe, torchvision's per-image ones, on one thread.

    python benchmarks/bench_augment.py

The variants run in alternation; the result is the median CPU time, which other processes hardly affect.
Kornia is no dependency: install it in an environment of its own. Both start from bytes and end with bytes.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from polyfed.data.augment import AUGMENTATIONS

SIZES, BATCH, TURNS = (32, 96, 224), 32, 7
RECIPES = ("flip", "flip_rotate", "crop4_flip", "flip_jitter", "imagenet", "domainbed")


def by_kornia(recipe: str, size: int) -> Callable[[Tensor], Tensor]:
    import kornia.augmentation as k

    flip = k.RandomHorizontalFlip()
    steps = {
        "flip": (flip,),
        "flip_rotate": (flip, k.RandomRotation(30.0, p=1.0)),
        "crop4_flip": (k.RandomCrop((size, size), padding=4, p=1.0), flip),
        "flip_jitter": (flip, k.ColorJitter(0.2, 0.2, 0.2, 0.2, p=0.5)),
        "imagenet": (k.RandomResizedCrop((size, size), scale=(0.08, 1.0), cropping_mode="resample"), flip),
        "domainbed": (
            k.RandomResizedCrop((size, size), scale=(0.7, 1.0), cropping_mode="resample"),
            flip,
            k.ColorJitter(0.3, 0.3, 0.3, 0.3, p=1.0),
            k.RandomGrayscale(p=0.1),
        ),
    }[recipe]
    whole = k.AugmentationSequential(*steps)
    return lambda x: (whole(x.float() / 255) * 255).round().clamp(0, 255).to(torch.uint8)


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
    print("| augmentation | pixels | ours, ms a batch of 32 | kornia | torchvision, image by image |\n|---|---|---|---|---|")
    for recipe in RECIPES:
        for size in SIZES:
            x = torch.randint(0, 256, (BATCH, 3, size, size), dtype=torch.uint8)
            contenders = [AUGMENTATIONS[recipe], by_kornia(recipe, size)]
            contenders += [by_torchvision(size)] if recipe == "domainbed" else []
            for work in contenders:
                work(x)
            taken = [[seconds(work, x) for work in contenders] for _ in range(TURNS)]
            medians = [f"{statistics.median(times) * 1000:.1f}" for times in zip(*taken, strict=True)]
            print(f"| `{recipe}` | {size} | " + " | ".join([*medians, ""][:3]) + " |", flush=True)


if __name__ == "__main__":
    main()
