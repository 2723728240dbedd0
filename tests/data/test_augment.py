"""Augmentation: each image of a batch has separate draws, and the same seed yields the same batch."""

from __future__ import annotations

import pickle

import pytest
import torch
from torchvision.transforms import RandomResizedCrop
from torchvision.transforms.v2 import functional as torchvision

from polyfed.data import augment
from polyfed.errors import OptionError

NAMES = sorted(augment.AUGMENTATIONS)


def batch(count=64, height=32, width=32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (count, 3, height, width), dtype=torch.uint8, generator=generator)


def seeded(name_or_step, x, seed=0):
    step = augment.AUGMENTATIONS[name_or_step] if isinstance(name_or_step, str) else name_or_step
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return step(x)


def test_every_augmentation():
    x = batch(8)
    before = x.clone()
    for name in NAMES:
        first, again, other = seeded(name, x), seeded(name, x), seeded(name, x, seed=1)
        assert first.shape == x.shape and first.dtype == torch.uint8, name
        assert torch.equal(first, again) and not torch.equal(first, other), name
        assert torch.equal(x, before), f"{name} changes its input"
        alike = seeded(name, x[:1].expand(32, -1, -1, -1))
        assert len({image.numpy().tobytes() for image in alike}) >= 2, f"{name} treats equal images alike"
        sent = pickle.loads(pickle.dumps(augment.augmentation(name)))
        assert torch.equal(seeded(sent, x), first), f"{name} cannot be sent to a worker"
        assert seeded(name, x[:0]).shape == (0, 3, 32, 32), name


def test_flip_mirrors_about_half():
    x = batch(400)
    result = seeded(augment.flip, x)
    mirrored = (result == x.flip(-1)).flatten(1).all(1)
    kept = (result == x).flatten(1).all(1)
    assert (mirrored ^ kept).all()
    assert 160 < mirrored.sum() < 240


def test_crop_moves_whole_images_and_fills_with_black():
    padding = 2
    x = batch(200).clamp_min(1)
    result = seeded(lambda images: augment.crop(images, padding), x)
    seen = set()
    for original, moved in zip(x, result, strict=True):
        surrounded = torch.zeros(3, 36, 36, dtype=torch.uint8)
        surrounded[:, 2:34, 2:34] = original
        places = [
            (t, left) for t in range(5) for left in range(5) if torch.equal(surrounded[:, t : t + 32, left : left + 32], moved)
        ]
        assert len(places) == 1
        seen.add(places[0])
    assert len(seen) == 25


def test_a_quarter_turn_is_exact_and_bounded(monkeypatch):
    x = batch(3, 8, 8)
    monkeypatch.setattr(torch, "rand", lambda *size: torch.ones(*size))
    assert torch.equal(augment.rotate(x, 90.0), x.rot90(1, (2, 3)))
    monkeypatch.setattr(torch, "rand", lambda *size: torch.full(size, 0.5))
    assert torch.equal(augment.rotate(x, 90.0, scale=0.5), x), "the middle of the range is no turn and no change of size"


def test_a_turn_keeps_shapes_in_images_that_are_not_square(monkeypatch):
    """A square in the middle of a wide image stays as high as wide when turned by 90 degrees."""
    x = torch.zeros(1, 3, 20, 40, dtype=torch.uint8)
    x[:, :, 7:13, 16:24] = 255
    monkeypatch.setattr(torch, "rand", lambda *size: torch.ones(*size))
    turned = augment.rotate(x, 90.0)[0, 0] > 0
    rows, columns = turned.any(1).nonzero(), turned.any(0).nonzero()
    assert (len(rows), len(columns)) == (8, 6)


def test_turning_takes_no_new_colours_and_fills_with_black():
    x = torch.full((50, 3, 32, 32), 200, dtype=torch.uint8)
    assert set(seeded(lambda images: augment.rotate(images, 30.0), x).unique().tolist()) == {0, 200}
    assert set(seeded(lambda images: augment.rotate(images, 50.0, 0.07, "reflection"), x).unique().tolist()) == {200}


def test_holes_are_squares_within_the_image():
    x = torch.full((300, 3, 32, 32), 9, dtype=torch.uint8)
    area = (seeded(lambda images: augment.cut_out(images, 16), x) == 0)[:, 0].sum((1, 2))
    assert area.max() == 256
    assert area.min() >= 64
    most = (seeded(lambda images: augment.cut_out(images, 2, maximum=8), x) == 0)[:, 0].sum((1, 2))
    assert 4 < most.max() <= 32


def test_light_changes_the_mean_by_its_factor():
    x = torch.full((500, 3, 4, 4), 100, dtype=torch.uint8)
    means = seeded(lambda images: augment.adjust_light(images, 0.2, 0.2, 0.2), x).float().mean((1, 2, 3))
    assert 79 <= means.min() < 85
    assert 115 < means.max() <= 121


def test_jitter_leaves_about_half_alone():
    x = batch(200, 8, 8)
    same = (seeded(augment.jitter, x) == x).flatten(1).all(1)
    assert 70 < same.sum() < 130


def pixels(count=6, seed=0):
    return batch(count, 12, 10, seed).float() / 255


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (augment.adjust_brightness, lambda image, amount: torchvision.adjust_brightness(image, 1 + amount)),
        (augment.adjust_contrast, lambda image, amount: torchvision.adjust_contrast(image, 1 + amount)),
        (augment.adjust_saturation, lambda image, amount: torchvision.adjust_saturation(image, 1 + amount)),
        (augment.rotate_hue, torchvision.adjust_hue),
    ],
)
def test_changes_of_colour_are_torchvisions(ours, theirs):
    x = torch.cat([pixels(), torch.full((1, 3, 12, 10), 0.4), torch.zeros(1, 3, 12, 10), torch.ones(1, 3, 12, 10)])
    amounts = torch.linspace(-0.3, 0.3, len(x))
    expected = torch.stack([theirs(image, float(amount)) for image, amount in zip(x, amounts, strict=True)])
    # torchvision's grey has 0.2989 of red, Pillow's and ours 0.299.
    assert (ours(x, amounts.view(-1, 1, 1, 1)) - expected).abs().max() < 5e-5


def test_grey_is_torchvisions():
    x = pixels()
    assert (augment.to_grey(x) - torchvision.rgb_to_grayscale(x, num_output_channels=3)).abs().max() < 2e-4, "0.2989 against 0.299"


def test_zoom_is_torchvisions_crop_and_resize(monkeypatch):
    x = pixels(40)
    parts = []
    whole = augment.resample

    def noted(images, rows, columns):
        parts.append((rows, columns))
        return whole(images, rows, columns)

    monkeypatch.setattr(augment, "resample", noted)
    result = seeded(augment.zoom, x)
    ((rows, columns),) = parts
    for image, made, down, across in zip(x, result, rows, columns, strict=True):
        (top, high), (left, wide) = (part_of(places, side) for places, side in ((down, 12), (across, 10)))
        expected = torchvision.resized_crop(image, top, left, high, wide, [12, 10], antialias=True)
        assert (made - expected).abs().max() < 1e-5, (top, left, high, wide)


def part_of(places: torch.Tensor, side: int) -> tuple[int, int]:
    """Start and length of the part whose pixels lie at these places: neighbours in the middle are length / side apart."""
    length = round(side * float(places[side // 2] - places[side // 2 - 1]))
    start = float(places[side // 2]) - ((side // 2 + 0.5) * length / side - 0.5)
    assert start == pytest.approx(round(start), abs=1e-4)
    return round(start), length


def test_zoom_draws_areas_and_ratios_as_torchvision_does(monkeypatch):
    drawn = []
    places = augment._coordinates
    monkeypatch.setattr(
        augment, "_coordinates", lambda side, length, start: (drawn.append((length, start)), places(side, length, start))[1]
    )
    seeded(augment.zoom, torch.zeros(4000, 3, 32, 32))
    (high, top), (wide, left) = drawn
    theirs = RandomResizedCrop(32, scale=(0.7, 1.0))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        boxes = torch.tensor([theirs.get_params(torch.zeros(3, 32, 32), theirs.scale, theirs.ratio) for _ in range(4000)]).float()
    for ours, column in ((top, 0), (left, 1), (high, 2), (wide, 3)):
        assert ours.mean() == pytest.approx(float(boxes[:, column].mean()), abs=0.25)
        assert ours.std() == pytest.approx(float(boxes[:, column].std()), abs=0.25)
        assert ours.min() >= boxes[:, column].min() - 1
        assert ours.max() <= boxes[:, column].max() + 1
    assert ((high * wide) / 1024).min() > 0.65
    assert (top + high).max() <= 32
    assert (left + wide).max() <= 32


def test_colour_jitter_changes_all_four_in_random_order(monkeypatch):
    seen = []
    changes = [lambda x, amount, name=name: (seen.append((name, len(x), amount.abs().max() <= 0.3)), x)[1] for name in "bcsh"]
    monkeypatch.setattr(augment, "COLOUR_CHANGES", tuple(changes))
    seeded(augment.colour_jitter, pixels(200))
    assert all(within for _, _, within in seen)
    assert [sum(count for name, count, _ in seen if name == one) for one in "bcsh"] == [200] * 4
    assert {name for name, count, _ in seen[:4] if 25 < count < 75} == set("bcsh"), "each is first for about a quarter"


def test_domainbed_greys_one_in_ten():
    result = seeded("domainbed", batch(1000, 8, 8)).float()
    grey = (result.amax(1) - result.amin(1)).flatten(1).amax(1) == 0
    assert 70 < grey.sum() < 130


def test_shear_and_shift_move_pixels_and_draw_nothing_if_disabled():
    x = torch.zeros(200, 3, 21, 21, dtype=torch.uint8)
    x[:, :, 10, 10] = 255
    moved = seeded(lambda x: augment.rotate(x, degrees=0.0, shift=0.2), x)
    places = moved[:, 0].flatten(1).argmax(1)
    rows, columns = places // 21, places % 21
    assert rows.min() >= 5 and rows.max() <= 15 and columns.float().std() > 1.5
    lines = torch.zeros(200, 3, 21, 21, dtype=torch.uint8)
    lines[:, :, :, 10] = 255
    sheared = seeded(lambda x: augment.rotate(x, degrees=0.0, shear=30.0), lines)[:, 0].float().argmax(2)
    assert (sheared[:, 10] == 10).all(), "the middle row stays"
    assert (sheared[:, 0] - 10 == 10 - sheared[:, 20]).float().mean() > 0.9, "the rows above and below move to opposite sides"
    assert sheared[:, 0].float().std() > 1.5
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        augment.rotate(lines, degrees=30.0)
        after = torch.rand(1)
        torch.manual_seed(0)
        torch.rand(2, 200)
        assert after == torch.rand(1), "angles and scales, nothing else"


def test_rand_augment_is_torchvisions_for_each_image():
    from torchvision.transforms.v2 import RandAugment

    x = batch(6)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        expected = torch.stack([RandAugment(2, 9)(image) for image in x])
    assert (seeded(augment.rand_augment, x, seed=3) == expected).all()


def test_preparations_by_name():
    plain = augment.preparation("none", "none")
    assert plain.augment is None
    assert plain.for_testing(torch.full((1, 3, 1, 1), 51, dtype=torch.uint8)).flatten().tolist() == pytest.approx([0.2] * 3)
    half = augment.preparation("half", "flip")
    assert half.for_testing(torch.full((1, 3, 1, 1), 255, dtype=torch.uint8)).flatten().tolist() == pytest.approx([1.0] * 3)
    with pytest.raises(OptionError, match="flip_rotate"):
        augment.preparation("half", "flip_rotat")
    with pytest.raises(OptionError, match="imagenet"):
        augment.preparation("imagenett", "none")
