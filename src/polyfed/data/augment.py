"""Augmentation of whole uint8 batches in which every image gets a random choice of its own.

The random classes of ``torchvision.transforms.v2`` draw once for a whole batch, which would turn 32 images
by the same angle; so the draws are made here, one per image, on the CPU from torch's default generator,
which the client seeds. The same draws are made on every device.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

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
"""Mean and standard deviation of each channel, for pixels from 0 to 1."""

GREY = (0.299, 0.587, 0.114)


def preparation(normalise: str, augment: str) -> Preparation:
    """The preparation with a normalisation and an augmentation by name."""
    if normalise not in NORMALISATIONS:
        raise OptionError(f"There is no normalisation called {normalise!r}. {nearest(normalise, NORMALISATIONS)}")
    mean, std = NORMALISATIONS[normalise]
    return Preparation(mean, std, augmentation(augment))


def augmentation(name: str) -> Augmentation | None:
    """An augmentation by name; ``none`` is none."""
    if name == "none":
        return None
    if name not in AUGMENTATIONS:
        raise OptionError(f"There is no augmentation called {name!r}. {nearest(name, ['none', *AUGMENTATIONS])}")
    return AUGMENTATIONS[name]


@dataclass(frozen=True)
class Steps:
    """Augmentations one after the other."""

    steps: tuple[Augmentation, ...]

    def __call__(self, x: Tensor) -> Tensor:
        """Augment a batch."""
        for step in self.steps:
            x = step(x)
        return x


def flip(x: Tensor, chance: float = 0.5, axis: int = -1) -> Tensor:
    """Mirror each image with this chance, left to right unless the axis is -2."""
    chosen = _per_image(x, torch.rand(len(x)) < chance)
    return torch.where(chosen, x.flip(axis), x)


def crop(x: Tensor, padding: int) -> Tensor:
    """Surround each image with black and cut its size out at a place of its own."""
    count, _, height, width = x.shape
    top = torch.randint(0, 2 * padding + 1, (count, 1))
    left = torch.randint(0, 2 * padding + 1, (count, 1))
    rows = (top + torch.arange(height)).to(x.device)
    columns = (left + torch.arange(width)).to(x.device)
    padded = functional.pad(x, [padding] * 4)
    images = torch.arange(count, device=x.device)[:, None, None]
    return padded[images, :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2).contiguous()


def turn(x: Tensor, degrees: float, scale: float = 0.0, outside: str = "zeros", shear: float = 0.0, shift: float = 0.0) -> Tensor:
    """Turn each image about its centre by an angle up to this one, and perhaps enlarge or shrink, shear and move it.

    Pixels are taken from their nearest place, so no new colours arise.

    Args:
        x: The batch.
        degrees: Largest angle, to either side.
        scale: Largest change of size, as a share.
        outside: What lies outside an image: ``zeros`` (black) or ``reflection``.
        shear: Largest angle of a shear along the rows, in degrees, to either side.
        shift: Largest move along each axis, as a share of the side.
    """
    if not len(x):
        return x
    count, _, height, width = x.shape
    angles = (torch.rand(count) * 2 - 1) * math.radians(degrees)
    zoom = 1 + (torch.rand(count) * 2 - 1) * scale
    cos, sin, zero = angles.cos() / zoom, angles.sin() / zoom, torch.zeros(count)
    # affine_grid measures both axes from -1 to 1, so an angle in pixels needs the ratio of the sides.
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


def holes(x: Tensor, side: int, maximum: int = 1, minimum: int = 1) -> Tensor:
    """Black out squares with random centres in each image; a square may reach over the edge."""
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


def light(x: Tensor, brightness: float, contrast: float, saturation: float = 0.0) -> Tensor:
    """Change brightness, contrast and saturation of each image by a factor of its own, 1 plus or minus these."""
    changed = x.float() * _factor(x, brightness)
    grey = (changed * torch.tensor(GREY, device=x.device).view(1, 3, 1, 1)).sum(1, keepdim=True)
    changed = torch.lerp(grey.mean((2, 3), keepdim=True).expand_as(changed), changed, _factor(x, contrast))
    if saturation:
        grey = (changed * torch.tensor(GREY, device=x.device).view(1, 3, 1, 1)).sum(1, keepdim=True)
        changed = torch.lerp(grey.expand_as(changed), changed, _factor(x, saturation))
    return changed.round().clamp(0, 255).to(torch.uint8)


def jitter(x: Tensor, strength: float = 0.2, chance: float = 0.5) -> Tensor:
    """Change brightness, contrast, saturation and hue of each image with this chance, each by up to this strength."""
    from torchvision.transforms.v2.functional import adjust_hue

    chosen = _per_image(x, torch.rand(len(x)) < chance)
    turns = ((torch.rand(len(x)) * 2 - 1) * strength).tolist()
    lit = light(x, strength, strength, strength)
    # adjust_hue takes one turn for all it gets, so it gets one image at a time.
    changed = [
        adjust_hue(image, turned) if use else image
        for image, turned, use in zip(lit, turns, chosen.flatten().tolist(), strict=True)
    ]
    return torch.where(chosen, torch.stack(changed), x) if changed else x


def zoom(x: Tensor, minimum: float = 0.7, ratio: float = 4 / 3, tries: int = 10) -> Tensor:
    """Cut a part out of each image and enlarge it to the whole (bilinear), as torchvision's RandomResizedCrop does.

    Args:
        x: The batch, as floats.
        minimum: Smallest share of an image's area that is cut out; the largest is all of it.
        ratio: Largest ratio of the part's longer side to its shorter one.
        tries: Draws of a part before the whole image is taken; a long part with a large area does not fit.
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
    return enlarged(x, _places(height, high, top), _places(width, wide, left))


def _places(side: int, length: Tensor, start: Tensor) -> Tensor:
    """Where on the old axis each pixel of the new one lies, for each image; never outside of the part that is enlarged."""
    places = (torch.arange(side) + 0.5) * length / side - 0.5
    return start + places.clamp_min(0).minimum(length - 1)


def enlarged(x: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Each image at these rows and columns of its own, with bilinear interpolation."""
    if not len(x):
        return x
    _, _, height, width = x.shape
    y, across = (2 * places / max(side - 1, 1) - 1 for places, side in ((rows, height), (columns, width)))
    grid = torch.stack([across[:, None, :].expand(-1, height, -1), y[:, :, None].expand(-1, -1, width)], dim=-1)
    return functional.grid_sample(x, grid.to(x.device), mode="bilinear", padding_mode="border", align_corners=True)


def colour_jitter(x: Tensor, strength: float = 0.3) -> Tensor:
    """Change brightness, contrast, saturation and hue of each image by up to this strength, in an order of its own.

    Takes and gives pixels from 0 to 1, as torchvision's ColorJitter does with floats.
    """
    order = torch.rand(len(x), len(COLOUR_CHANGES)).argsort(1)
    amounts = (torch.rand(len(x), len(COLOUR_CHANGES)) * 2 - 1) * strength
    for turn_of in order.T:
        for number, change in enumerate(COLOUR_CHANGES):
            chosen = (turn_of == number).nonzero().flatten()
            if len(chosen):
                place = chosen.to(x.device)
                x = x.index_copy(0, place, change(x[place], _per_image(x, amounts[chosen, number])))
    return x


def brightened(x: Tensor, amount: Tensor) -> Tensor:
    """Pixels from 0 to 1 times (1 + amount)."""
    return (x * (1 + amount)).clamp(0, 1)


def contrasted(x: Tensor, amount: Tensor) -> Tensor:
    """Pixels from 0 to 1, moved away from the mean grey of their image."""
    return torch.lerp(greyed(x).mean((1, 2, 3), keepdim=True), x, 1 + amount).clamp(0, 1)


def saturated(x: Tensor, amount: Tensor) -> Tensor:
    """Pixels from 0 to 1, moved away from their own grey."""
    return torch.lerp(greyed(x), x, 1 + amount).clamp(0, 1)


def hue_turned(x: Tensor, amount: Tensor) -> Tensor:
    """Pixels from 0 to 1 with their hue turned by this share of the circle."""
    value, place = x.max(1, keepdim=True)
    chroma = value - x.amin(1, keepdim=True)
    red, green, blue = torch.chunk(x, 3, dim=1)
    difference = torch.cat([green - blue, blue - red, red - green], dim=1).gather(1, place)
    sector = 2 * place + difference / torch.where(chroma > 0, chroma, 1.0) + 6 * amount
    # A channel is at the value near its own hue, falls off over one sixth of the circle, and lies a chroma lower elsewhere.
    distance = (sector + torch.tensor([5.0, 3.0, 1.0], device=x.device).view(1, 3, 1, 1)).remainder(6)
    return value - chroma * torch.minimum(distance, 4 - distance).clamp(0, 1)


def greyed(x: Tensor) -> Tensor:
    """The images in grey, as three equal channels."""
    return (x * torch.tensor(GREY, device=x.device).view(1, 3, 1, 1)).sum(1, keepdim=True).expand_as(x)


def domainbed(x: Tensor) -> Tensor:
    """DomainBed's augmentation: a part of 0.7 to 1 of the area, mirrored, colours changed by up to 0.3, one in ten in grey."""
    x = colour_jitter(flip(zoom(x.float() / 255)))
    x = torch.where(_per_image(x, torch.rand(len(x)) < 0.1), greyed(x), x)
    return (x * 255).round().to(torch.uint8)


def imagenet(x: Tensor) -> Tensor:
    """PyTorch's recipe for ImageNet: a part of 0.08 to 1 of the area enlarged to the whole, then mirrored by chance."""
    return flip(zoom(x.float(), minimum=0.08)).round().clamp(0, 255).to(torch.uint8)


def rand_augment(x: Tensor, operations: int = 2, magnitude: int = 9) -> Tensor:
    """Torchvision's RandAugment, drawn for each image."""
    from torchvision.transforms.v2 import RandAugment

    change = RandAugment(operations, magnitude)
    return torch.stack([change(image) for image in x]) if len(x) else x


def pair_augmentation(crop: int, flip: bool) -> PairAugmentation | None:
    """Return the augmentation of images with their masks; None if nothing is cropped or flipped."""
    return CropAndFlip(crop, flip) if crop or flip else None


@dataclass(frozen=True)
class CropAndFlip:
    """Cut a square out of each image at a place of its own, and mirror it with a chance of one half; masks likewise.

    Draws from torch's default generator, as all augmentations do.

    Attributes:
        side: Side of the square; 0: nothing is cut.
        flip: Whether images are mirrored, left to right.
    """

    side: int = 0
    flip: bool = True

    def __call__(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Augment a batch of images (n, channels, height, width) and masks (n, height, width)."""
        if x.shape[-2:] != y.shape[-2:]:
            raise DataError(f"Images of {tuple(x.shape[-2:])} pixels and masks of {tuple(y.shape[-2:])} cannot be moved together.")
        if self.side:
            x, y = self._cropped(x, y)
        if self.flip:
            chosen = (torch.rand(len(x)) < 0.5).to(x.device)
            x = torch.where(chosen.view(-1, 1, 1, 1), x.flip(-1), x)
            y = torch.where(chosen.view(-1, 1, 1), y.flip(-1), y)
        return x, y

    def _cropped(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """The squares that were drawn; of a smaller image all there is along that side."""
        count, _, height, width = x.shape
        tall, wide = min(self.side, height), min(self.side, width)
        top, left = torch.randint(0, height - tall + 1, (count,)), torch.randint(0, width - wide + 1, (count,))
        rows = (top[:, None] + torch.arange(tall)).to(x.device)[:, :, None]
        columns = (left[:, None] + torch.arange(wide)).to(x.device)[:, None, :]
        images = torch.arange(count, device=x.device)[:, None, None]
        # Channels end up last when indices stand on both sides of their slice.
        return x[images, :, rows, columns].permute(0, 3, 1, 2).contiguous(), y[images, rows, columns]


COLOUR_CHANGES = (brightened, contrasted, saturated, hue_turned)


def _per_image(x: Tensor, values: Tensor) -> Tensor:
    return values.view(-1, *(1,) * (x.dim() - 1)).to(x.device)


def _factor(x: Tensor, strength: float) -> Tensor:
    return _per_image(x, 1 + (torch.rand(len(x)) * 2 - 1) * strength)


def _skin_holes(x: Tensor) -> Tensor:
    """One to eight holes of 16 pixels at 200 pixels a side, in proportion at other sizes."""
    return holes(x, side=max(1, round(x.shape[-1] * 16 / 200)), maximum=8)


AUGMENTATIONS: Mapping[str, Augmentation] = {
    "flip": flip,
    "flip_rotate": Steps((flip, partial(turn, degrees=30.0))),
    "crop_flip": Steps((partial(crop, padding=2), flip)),
    "crop4_flip": Steps((partial(crop, padding=4), flip)),
    "crop4_flip_cutout": Steps((partial(crop, padding=4), flip, partial(holes, side=16))),
    "flip_jitter": Steps((flip, jitter)),
    "domainbed": domainbed,
    "imagenet": imagenet,
    "randaugment": Steps((flip, rand_augment)),
    "imagenet_randaugment": Steps((imagenet, rand_augment)),
    "flamby": Steps(
        (
            partial(turn, degrees=50.0, scale=0.07, outside="reflection", shear=0.1, shift=12 / 200),
            partial(light, brightness=0.15, contrast=0.1),
            flip,
            partial(flip, axis=-2),
            _skin_holes,
        )
    ),
    "skin": Steps(
        (
            partial(turn, degrees=50.0, scale=0.07, outside="reflection"),
            partial(light, brightness=0.15, contrast=0.1),
            flip,
            partial(flip, axis=-2),
            _skin_holes,
        )
    ),
}
"""flip_rotate: FedBN's for Office-Caltech-10. crop_flip: FixBN's for CIFAR-10. crop4_flip_cutout: EasyFL's for CIFAR-10.
flip_jitter: gPerXAN's for PACS. domainbed: DomainBed's, which hFedF follows; the part is cut out of the image at its size here, not out of
the file's. imagenet: PyTorch's, for FixBN's Tiny-ImageNet and ImageNet. flamby: FLamby's for Fed-ISIC2019; its random crop of 200 of 224
pixels, against the middle crop in tests, is a move by up to 12 of 200 pixels here. skin: flamby without crop and shear."""
