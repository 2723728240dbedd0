"""Augment whole uint8 batches with independent random draws for every image.

The random transforms of ``torchvision.transforms.v2`` draw once per batch, so they would rotate all images by the same angle. Here,
each image has its own draws, on the CPU from torch's default generator, which the client seeds. The draws are the same on every device.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from polyfed.core.data_types import Augmentation, PairAugmentation, Preparation
from polyfed.errors import DataError, OptionError, nearest

NORMALISATIONS: Mapping[str, tuple[tuple[float, ...], tuple[float, ...]]] = {
    "none": ((0.0, 0.0, 0.0), (1.0, 1.0, 1.0)),
    "half": ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),
    "imagenet": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    "cifar10": ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
}
"""Mean and standard deviation per channel, for pixels from 0 to 1."""

GREY = (0.299, 0.587, 0.114)


def preparation(normalise: str, augment: str) -> Preparation:
    """Return the preparation with the named normalisation and augmentation."""
    if normalise not in NORMALISATIONS:
        raise OptionError(f"Unknown normalisation {normalise!r}. {nearest(normalise, NORMALISATIONS)}")
    mean, std = NORMALISATIONS[normalise]
    return Preparation(mean, std, augmentation(augment))


def augmentation(name: str) -> Augmentation | None:
    """Return the named augmentation, or None for ``none``."""
    if name == "none":
        return None
    if name not in AUGMENTATIONS:
        raise OptionError(f"Unknown augmentation {name!r}. {nearest(name, ['none', *AUGMENTATIONS])}")
    return AUGMENTATIONS[name]


@dataclass(frozen=True)
class Steps:
    """Augmentations applied in sequence."""

    steps: tuple[Augmentation, ...]

    def __call__(self, x: Tensor) -> Tensor:
        for step in self.steps:
            x = step(x)
        return x


def flip(x: Tensor, probability: float = 0.5, axis: int = -1) -> Tensor:
    """Mirror each image with the given probability: left to right, or top to bottom with axis -2."""
    chosen = _per_image(x, torch.rand(len(x)) < probability)
    return torch.where(chosen, x.flip(axis), x)


def crop(x: Tensor, padding: int) -> Tensor:
    """Pad each image with black, and crop it to its original size at a random position."""
    count, _, height, width = x.shape
    top = torch.randint(0, 2 * padding + 1, (count, 1))
    left = torch.randint(0, 2 * padding + 1, (count, 1))
    rows = (top + torch.arange(height)).to(x.device)
    columns = (left + torch.arange(width)).to(x.device)
    padded = functional.pad(x, [padding] * 4)
    images = torch.arange(count, device=x.device)[:, None, None]
    return padded[images, :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2).contiguous()


def rotate(x: Tensor, degrees: float, scale: float = 0.0, outside: str = "zeros", shear: float = 0.0, shift: float = 0.0) -> Tensor:
    """Rotate each image about its centre by a random angle, and optionally scale, shear and shift it (nearest neighbour).

    Args:
        x: The batch.
        degrees: Largest angle in either direction.
        scale: Largest relative change of size.
        outside: Padding: ``zeros`` (black) or ``reflection``.
        shear: Largest shear angle along the rows, in degrees, in either direction.
        shift: Largest shift along each axis, as a fraction of the side.
    """
    if not len(x):
        return x
    count, _, height, width = x.shape
    angles = (torch.rand(count) * 2 - 1) * math.radians(degrees)
    factor = 1 + (torch.rand(count) * 2 - 1) * scale
    cos, sin, zero = angles.cos() / factor, angles.sin() / factor, torch.zeros(count)
    # affine_grid scales both axes to -1 to 1, so an angle in pixels must be corrected by the aspect ratio.
    first = torch.stack([cos, -sin * (height / width), zero], dim=1)
    second = torch.stack([sin * (width / height), cos, zero], dim=1)
    if shear:
        slope = ((torch.rand(count) * 2 - 1) * math.radians(shear)).tan() * (height / width)
        first = first + slope[:, None] * second
    theta = torch.stack([first, second], dim=1)
    if shift:
        theta[:, :, 2] = (torch.rand(count, 2) * 2 - 1) * 2 * shift
    theta = theta.to(x.device)
    grid = functional.affine_grid(theta, list(x.shape), align_corners=False)
    moved = functional.grid_sample(x.float(), grid, mode="nearest", padding_mode=outside, align_corners=False)
    return moved.to(torch.uint8)


def cut_out(x: Tensor, side: int, maximum: int = 1, minimum: int = 1) -> Tensor:
    """Black out squares with random centres in each image. A square may extend beyond the edge."""
    count, _, height, width = x.shape
    number = torch.randint(minimum, maximum + 1, (count,))
    visible = torch.ones(count, height, width, dtype=torch.bool)
    for hole in range(maximum):
        top = torch.randint(0, height, (count, 1)) - side // 2
        left = torch.randint(0, width, (count, 1)) - side // 2
        rows = (torch.arange(height) >= top) & (torch.arange(height) < top + side)
        columns = (torch.arange(width) >= left) & (torch.arange(width) < left + side)
        visible &= ~(rows[:, :, None] & columns[:, None, :] & (number > hole)[:, None, None])
    return x * visible[:, None].to(x.device)


def adjust_light(x: Tensor, brightness: float, contrast: float, saturation: float = 0.0) -> Tensor:
    """Multiply brightness, contrast and saturation of each image by random factors that differ from 1 by at most the given values."""
    changed = x.float() * _factor(x, brightness)
    grey = (changed * torch.tensor(GREY, device=x.device).view(1, 3, 1, 1)).sum(1, keepdim=True)
    changed = torch.lerp(grey.mean((2, 3), keepdim=True).expand_as(changed), changed, _factor(x, contrast))
    if saturation:
        grey = (changed * torch.tensor(GREY, device=x.device).view(1, 3, 1, 1)).sum(1, keepdim=True)
        changed = torch.lerp(grey.expand_as(changed), changed, _factor(x, saturation))
    return changed.round().clamp(0, 255).to(torch.uint8)


def jitter(x: Tensor, strength: float = 0.2, probability: float = 0.5) -> Tensor:
    """Change brightness, contrast, saturation and hue of each image by up to ``strength``, with the given probability."""
    from torchvision.transforms.v2.functional import adjust_hue

    chosen = _per_image(x, torch.rand(len(x)) < probability)
    angles = ((torch.rand(len(x)) * 2 - 1) * strength).tolist()
    lit = adjust_light(x, strength, strength, strength)
    # adjust_hue applies one angle to all images, so it receives one image at a time.
    changed = [
        adjust_hue(image, angle) if use else image for image, angle, use in zip(lit, angles, chosen.flatten().tolist(), strict=True)
    ]
    return torch.where(chosen, torch.stack(changed), x) if changed else x


def zoom(x: Tensor, minimum: float = 0.7, ratio: float = 4 / 3, tries: int = 10) -> Tensor:
    """Crop each image at random and resize the crop to the original size (bilinear), as torchvision's RandomResizedCrop does.

    Args:
        x: The batch, as floats.
        minimum: Smallest fraction of the image area to crop.
        ratio: Largest aspect ratio of the crop.
        tries: Number of draws before the whole image is used, because an elongated crop with a large area may not fit.
    """
    count, _, height, width = x.shape
    area = (torch.rand(count, tries) * (1 - minimum) + minimum) * height * width
    shape = ((torch.rand(count, tries) * 2 - 1) * math.log(ratio)).exp()
    wide, high = (area * shape).sqrt().round(), (area / shape).sqrt().round()
    fits = (wide <= width) & (high <= height) & (wide > 0) & (high > 0)
    first = fits.int().argmax(1, keepdim=True)
    found = fits.any(1, keepdim=True)
    wide = torch.where(found, wide.gather(1, first), float(width))
    high = torch.where(found, high.gather(1, first), float(height))
    top = (torch.rand(count, 1) * (height - high + 1)).floor()
    left = (torch.rand(count, 1) * (width - wide + 1)).floor()
    return resample(x, _coordinates(height, high, top), _coordinates(width, wide, left))


def _coordinates(side: int, length: Tensor, start: Tensor) -> Tensor:
    """Return the position in the original image of each resized pixel along one axis, clamped to the crop."""
    places = (torch.arange(side) + 0.5) * length / side - 0.5
    return start + places.clamp_min(0).minimum(length - 1)


def resample(x: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Sample each image at its given rows and columns, with bilinear interpolation."""
    if not len(x):
        return x
    _, _, height, width = x.shape
    y, across = (2 * places / max(side - 1, 1) - 1 for places, side in ((rows, height), (columns, width)))
    grid = torch.stack([across[:, None, :].expand(-1, height, -1), y[:, :, None].expand(-1, -1, width)], dim=-1)
    return functional.grid_sample(x, grid.to(x.device), mode="bilinear", padding_mode="border", align_corners=True)


def colour_jitter(x: Tensor, strength: float = 0.3) -> Tensor:
    """Change brightness, contrast, saturation and hue of each image by up to ``strength``, in a random order.

    Pixels range from 0 to 1, as in torchvision's ColorJitter for floats.
    """
    order = torch.rand(len(x), len(COLOUR_CHANGES)).argsort(1)
    amounts = (torch.rand(len(x), len(COLOUR_CHANGES)) * 2 - 1) * strength
    for position in order.T:
        for number, change in enumerate(COLOUR_CHANGES):
            chosen = (position == number).nonzero().flatten()
            if len(chosen):
                place = chosen.to(x.device)
                x = x.index_copy(0, place, change(x[place], _per_image(x, amounts[chosen, number])))
    return x


def adjust_brightness(x: Tensor, amount: Tensor) -> Tensor:
    return (x * (1 + amount)).clamp(0, 1)


def adjust_contrast(x: Tensor, amount: Tensor) -> Tensor:
    return torch.lerp(to_grey(x).mean((1, 2, 3), keepdim=True), x, 1 + amount).clamp(0, 1)


def adjust_saturation(x: Tensor, amount: Tensor) -> Tensor:
    return torch.lerp(to_grey(x), x, 1 + amount).clamp(0, 1)


def rotate_hue(x: Tensor, amount: Tensor) -> Tensor:
    """Rotate the hue of pixels from 0 to 1 by ``amount`` full turns."""
    value, place = x.max(1, keepdim=True)
    chroma = value - x.amin(1, keepdim=True)
    red, green, blue = torch.chunk(x, 3, dim=1)
    difference = torch.cat([green - blue, blue - red, red - green], dim=1).gather(1, place)
    sector = 2 * place + difference / torch.where(chroma > 0, chroma, 1.0) + 6 * amount
    # A channel equals the HSV value near its hue, and falls to the value minus the chroma over the next sixth of the colour circle.
    distance = (sector + torch.tensor([5.0, 3.0, 1.0], device=x.device).view(1, 3, 1, 1)).remainder(6)
    return value - chroma * torch.minimum(distance, 4 - distance).clamp(0, 1)


def to_grey(x: Tensor) -> Tensor:
    """Return the images in grey, as three equal channels."""
    return (x * torch.tensor(GREY, device=x.device).view(1, 3, 1, 1)).sum(1, keepdim=True).expand_as(x)


def domainbed(x: Tensor) -> Tensor:
    """Apply DomainBed's augmentation: crop 0.7 to 1 of the area, flip, colour jitter of 0.3, and grey with probability 0.1."""
    x = colour_jitter(flip(zoom(x.float() / 255)))
    x = torch.where(_per_image(x, torch.rand(len(x)) < 0.1), to_grey(x), x)
    return (x * 255).round().to(torch.uint8)


def imagenet(x: Tensor) -> Tensor:
    """Apply PyTorch's recipe for ImageNet: crop 0.08 to 1 of the area, resize, and flip."""
    return flip(zoom(x.float(), minimum=0.08)).round().clamp(0, 255).to(torch.uint8)


def rand_augment(x: Tensor, operations: int = 2, magnitude: int = 9) -> Tensor:
    """Apply torchvision's RandAugment with independent draws for each image."""
    from torchvision.transforms.v2 import RandAugment

    change = RandAugment(operations, magnitude)
    return torch.stack([change(image) for image in x]) if len(x) else x


def pair_augmentation(crop: int, flip: bool) -> PairAugmentation | None:
    """Return the augmentation of images with masks, or None if nothing is cropped or flipped."""
    return CropAndFlip(crop, flip) if crop or flip else None


@dataclass(frozen=True)
class CropAndFlip:
    """Crop each image to a random square of side ``side`` (0: no crop) and mirror it with probability 0.5, together with its mask."""

    side: int = 0
    flip: bool = True

    def __call__(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Augment a batch of images (n, channels, height, width) and masks (n, height, width)."""
        if x.shape[-2:] != y.shape[-2:]:
            raise DataError(
                f"Images and masks must have the same size, got {tuple(x.shape[-2:])} and {tuple(y.shape[-2:])} pixels."
            )
        if self.side:
            x, y = self._crop(x, y)
        if self.flip:
            chosen = (torch.rand(len(x)) < 0.5).to(x.device)
            x = torch.where(chosen.view(-1, 1, 1, 1), x.flip(-1), x)
            y = torch.where(chosen.view(-1, 1, 1), y.flip(-1), y)
        return x, y

    def _crop(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        count, _, height, width = x.shape
        tall, wide = min(self.side, height), min(self.side, width)
        top, left = torch.randint(0, height - tall + 1, (count,)), torch.randint(0, width - wide + 1, (count,))
        rows = (top[:, None] + torch.arange(tall)).to(x.device)[:, :, None]
        columns = (left[:, None] + torch.arange(wide)).to(x.device)[:, None, :]
        images = torch.arange(count, device=x.device)[:, None, None]
        # Channels end up last if there are indices on both sides of their slice.
        return x[images, :, rows, columns].permute(0, 3, 1, 2).contiguous(), y[images, rows, columns]


COLOUR_CHANGES = (adjust_brightness, adjust_contrast, adjust_saturation, rotate_hue)


def _per_image(x: Tensor, values: Tensor) -> Tensor:
    return values.view(-1, *(1,) * (x.dim() - 1)).to(x.device)


def _factor(x: Tensor, strength: float) -> Tensor:
    return _per_image(x, 1 + (torch.rand(len(x)) * 2 - 1) * strength)


def _skin_holes(x: Tensor) -> Tensor:
    """Cut out one to eight squares of 16 pixels from images of 200x200 pixels, in proportion at other sizes."""
    return cut_out(x, side=max(1, round(x.shape[-1] * 16 / 200)), maximum=8)


def _skin_steps(**moves: Any) -> Steps:
    rotation = partial(rotate, degrees=50.0, scale=0.07, outside="reflection", **moves)
    return Steps((rotation, partial(adjust_light, brightness=0.15, contrast=0.1), flip, partial(flip, axis=-2), _skin_holes))


AUGMENTATIONS: Mapping[str, Augmentation] = {
    "flip": flip,
    "flip_rotate": Steps((flip, partial(rotate, degrees=30.0))),
    "crop_flip": Steps((partial(crop, padding=2), flip)),
    "crop4_flip": Steps((partial(crop, padding=4), flip)),
    "crop4_flip_cutout": Steps((partial(crop, padding=4), flip, partial(cut_out, side=16))),
    "flip_jitter": Steps((flip, jitter)),
    "domainbed": domainbed,
    "imagenet": imagenet,
    "randaugment": Steps((flip, rand_augment)),
    "imagenet_randaugment": Steps((imagenet, rand_augment)),
    "flamby": _skin_steps(shear=0.1, shift=12 / 200),
    "skin": _skin_steps(),
}
"""Sources: flip_rotate, FedBN on Office-Caltech-10; crop_flip, FixBN on CIFAR-10; crop4_flip_cutout, EasyFL on CIFAR-10;
flip_jitter, gPerXAN on PACS; domainbed, DomainBed and hFedF; imagenet, PyTorch, and FixBN on (Tiny-)ImageNet; flamby, FLamby on
Fed-ISIC2019. domainbed crops the resized image, not the original file. FLamby's random crop of 200 from 224 pixels, compared with
the centre crop in tests, is a shift of up to 12 of 200 pixels here. skin is flamby without crop and shear."""
