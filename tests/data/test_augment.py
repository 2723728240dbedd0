"""Augmentation: each image of a batch gets its own draw, and the same seed gives the same batch."""

from __future__ import annotations

import pickle

import pytest
import torch

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


@pytest.mark.parametrize("name", NAMES)
def test_shape_type_and_seed(name):
    x = batch(8)
    before = x.clone()
    first, again, other = seeded(name, x), seeded(name, x), seeded(name, x, seed=1)
    assert first.shape == x.shape
    assert first.dtype == torch.uint8
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(x, before), "the data themselves are never changed"


@pytest.mark.parametrize("name", NAMES)
def test_equal_images_are_treated_differently(name):
    x = batch(1).expand(32, -1, -1, -1)
    assert len({image.numpy().tobytes() for image in seeded(name, x)}) >= 2


@pytest.mark.parametrize("name", NAMES)
def test_an_augmentation_can_be_sent_to_a_worker(name):
    x = batch(4)
    sent = pickle.loads(pickle.dumps(augment.augmentation(name)))
    assert torch.equal(seeded(sent, x), seeded(name, x))


@pytest.mark.parametrize("name", NAMES)
def test_an_empty_batch(name):
    assert seeded(name, batch(8)[:0]).shape == (0, 3, 32, 32)


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
    assert torch.equal(augment.turn(x, 90.0), x.rot90(1, (2, 3)))
    monkeypatch.setattr(torch, "rand", lambda *size: torch.full(size, 0.5))
    assert torch.equal(augment.turn(x, 90.0, scale=0.5), x), "the middle of the range is no turn and no change of size"


def test_a_turn_keeps_shapes_in_images_that_are_not_square(monkeypatch):
    """A square in the middle of a wide image stays as high as wide when turned by 90 degrees."""
    x = torch.zeros(1, 3, 20, 40, dtype=torch.uint8)
    x[:, :, 7:13, 16:24] = 255
    monkeypatch.setattr(torch, "rand", lambda *size: torch.ones(*size))
    turned = augment.turn(x, 90.0)[0, 0] > 0
    rows, columns = turned.any(1).nonzero(), turned.any(0).nonzero()
    assert (len(rows), len(columns)) == (8, 6)


def test_turning_takes_no_new_colours_and_fills_with_black():
    x = torch.full((50, 3, 32, 32), 200, dtype=torch.uint8)
    assert set(seeded(lambda images: augment.turn(images, 30.0), x).unique().tolist()) == {0, 200}
    assert set(seeded(lambda images: augment.turn(images, 50.0, 0.07, "reflection"), x).unique().tolist()) == {200}


def test_holes_are_squares_within_the_image():
    x = torch.full((300, 3, 32, 32), 9, dtype=torch.uint8)
    area = (seeded(lambda images: augment.holes(images, 16), x) == 0)[:, 0].sum((1, 2))
    assert area.max() == 256
    assert area.min() >= 64
    most = (seeded(lambda images: augment.holes(images, 2, most=8), x) == 0)[:, 0].sum((1, 2))
    assert 4 < most.max() <= 32


def test_light_changes_the_mean_by_its_factor():
    x = torch.full((500, 3, 4, 4), 100, dtype=torch.uint8)
    means = seeded(lambda images: augment.light(images, 0.2, 0.2, 0.2), x).float().mean((1, 2, 3))
    assert 79 <= means.min() < 85
    assert 115 < means.max() <= 121


def test_jitter_leaves_about_half_alone():
    x = batch(200, 8, 8)
    same = (seeded(augment.jitter, x) == x).flatten(1).all(1)
    assert 70 < same.sum() < 130


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
