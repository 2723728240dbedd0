"""digits-mini: content, determinism, and splits that share nothing."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from itertools import combinations

import numpy as np
import pytest
import torch

from helpers.made_once import paint
from polyfed.core.data_types import ArrayExamples, DataSet, Domain
from polyfed.data.registry import data_sets
from polyfed.data.sets import digit_recipes as recipes
from polyfed.data.sets import digits_mini as module
from polyfed.data.sets.digits_mini import digits_mini
from polyfed.errors import OptionError

SPLITS = ("train", "validation", "test")


def examples(domain: Domain, split: str) -> ArrayExamples:
    found = getattr(domain, split)
    assert isinstance(found, ArrayExamples)
    return found


def digest(dataset: DataSet) -> str:
    seen = hashlib.sha256()
    for domain in dataset.domains:
        for split in SPLITS:
            part = examples(domain, split)
            seen.update(part.x.numpy().tobytes())
            seen.update(part.y.numpy().tobytes())
    return seen.hexdigest()


@pytest.fixture(scope="module", autouse=True)
def painted_each_time() -> Iterator[None]:
    """Paint the images for these tests. Other tests copy images that were painted once."""
    module._examples, copied = paint, module._examples
    yield
    module._examples = copied


@pytest.fixture(scope="module")
def dataset() -> DataSet:
    return data_sets.build("digits-mini")


@pytest.fixture(scope="module")
def material() -> recipes.Material:
    return recipes.load_material()


def test_description(dataset: DataSet) -> None:
    assert dataset.name == "digits-mini"
    assert dataset.classes == ("0", "1", "2", "3", "4", "5", "6", "7", "8", "9")
    assert [domain.name for domain in dataset.domains] == ["pen", "photo", "print", "street", "post"]
    assert dataset.preparation.mean == dataset.preparation.std == (0.5, 0.5, 0.5)
    assert dataset.default_model == "small_cnn"
    assert "recipe 1" in dataset.source


def test_counts_types_and_classes(dataset: DataSet) -> None:
    for domain in dataset.domains:
        test = 400 if domain.name in ("print", "street") else 220
        for split, expected in zip(SPLITS, (300, 60, test), strict=True):
            part = examples(domain, split)
            assert part.x.dtype == torch.uint8 and part.x.shape == (expected, 3, 28, 28)
            assert part.y.dtype == torch.int64
            assert torch.bincount(part.y, minlength=10).tolist() == [expected // 10] * 10


def test_same_bytes_whatever_the_global_generators_hold(dataset: DataSet) -> None:
    states = random.getstate(), np.random.get_state(legacy=True), torch.get_rng_state()
    try:
        random.seed(5)
        np.random.seed(5)
        torch.manual_seed(5)
        expected = random.random(), np.random.random(), torch.rand(1).item()
        random.seed(5)
        np.random.seed(5)
        torch.manual_seed(5)
        again = digits_mini()
        assert (random.random(), np.random.random(), torch.rand(1).item()) == expected
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])
    assert digest(again) == digest(dataset)


def test_no_picture_appears_twice(dataset: DataSet) -> None:
    seen: set[bytes] = set()
    total = 0
    for domain in dataset.domains:
        for split in SPLITS:
            part = examples(domain, split)
            total += len(part)
            seen |= {picture.numpy().tobytes() for picture in part.x}
    assert len(seen) == total == 3 * 580 + 2 * 760


def test_fewer_training_examples_are_the_first_of_more(dataset: DataSet) -> None:
    few = data_sets.build("digits-mini(per_domain=34)")
    for small, large in zip(few.domains, dataset.domains, strict=True):
        assert torch.equal(examples(small, "train").x, examples(large, "train").x[:34])
        assert sorted(torch.bincount(examples(small, "train").y).tolist()) == [3] * 6 + [4] * 4
        for split in ("validation", "test"):
            assert torch.equal(examples(small, split).x, examples(large, split).x)


@pytest.mark.parametrize("wrong", [9, 301, -1])
def test_impossible_sizes_are_rejected(wrong: int) -> None:
    with pytest.raises(OptionError, match=r"10 .* and 300 training"):
        digits_mini(wrong)


def test_domains_and_splits_share_no_handwriting(material: recipes.Material) -> None:
    parts = module.handwriting_indices(material.labels)
    assert sorted(parts) == ["pen", "photo", "post"]
    indices = [parts[domain][split] for domain in parts for split in SPLITS]
    together = np.concatenate(indices)
    assert len(np.unique(together)) == len(together) == 1740
    assert together.min() >= 0 and together.max() < 1797
    # Different indices must also mean different content.
    contents = [{material.handwriting[index].tobytes() for index in part} for part in indices]
    assert not any(one & other for one, other in combinations(contents, 2))


def test_labels_are_those_of_the_handwriting(dataset: DataSet, material: recipes.Material) -> None:
    parts = module.handwriting_indices(material.labels)
    for name, splits in parts.items():
        for split, indices in splits.items():
            assert examples(dataset.domain(name), split).y.tolist() == material.labels[indices].tolist()


def test_pen_shows_the_handwriting_it_names(dataset: DataSet, material: recipes.Material) -> None:
    """Averaged back to 8x8, a picture is nearest to its own sample among all that pen trains on."""
    indices = module.handwriting_indices(material.labels)["pen"]["train"]
    x = examples(dataset.domain("pen"), "train").x[:, 0, 2:26, 2:26].double().numpy()
    small = x.reshape(300, 8, 3, 8, 3).mean(axis=(2, 4)).reshape(300, 64)
    known = material.handwriting[indices].reshape(300, 64)
    agreement = np.corrcoef(small, known)[:300, 300:]
    assert (agreement.argmax(axis=1) == np.arange(300)).all()


def test_splits_share_no_photo_regions(material: recipes.Material) -> None:
    count, height, width = material.photographs.shape[:3]
    owners = np.zeros((count, height, width), dtype=int)
    regions = module.photo_regions(count, height, width)
    assert [len(regions[split]) for split in SPLITS] == [98, 14, 28]
    for blocks in regions.values():
        assert {block[0] for block in blocks} == {0, 1}
        for photograph, top, left, bottom, right in blocks:
            assert min(bottom - top, right - left) >= 28
            owners[photograph, top:bottom, left:right] += 1
    assert (owners == 1).all()


def test_crops_stay_inside_their_blocks() -> None:
    marked = np.zeros((1, 120, 120, 3), dtype=np.uint8)
    marked[0, 40:80, 30:90] = 200
    crops = [recipes._crop(marked, [(0, 40, 30, 80, 90)], np.random.default_rng(i)) for i in range(200)]
    assert all((crop == 200).all() for crop in crops)


def test_photo_is_the_absolute_difference() -> None:
    flat = np.full((1, 60, 60, 3), 60, dtype=np.uint8)
    stroke = np.zeros((8, 8), dtype=np.float32)
    stroke[:, 2:6] = 1
    picture = recipes.photo(stroke, flat, [(0, 0, 0, 60, 60)], np.random.default_rng(0))
    assert (picture[14, 14] == 255 - 60).all()
    assert (picture[14, 0] == 60).all()


def test_grey_domains_are_grey_and_the_others_are_not(dataset: DataSet) -> None:
    for domain in dataset.domains:
        x = examples(domain, "train").x.int()
        grey = bool((x[:, 0] == x[:, 1]).all() and (x[:, 1] == x[:, 2]).all())
        assert grey == (domain.name in ("pen", "post"))


def test_colours_keep_their_contrast_also_when_muted() -> None:
    for seed in range(300):
        first, second = recipes._colours(40, 85, 0.45, np.random.default_rng(seed))
        contrast = abs(sum(w * (float(a) - float(b)) for w, a, b in zip((0.299, 0.587, 0.114), first, second, strict=True)))
        assert 40 - 1e-3 <= contrast <= 85 + 1e-3


def test_print_is_readable_and_more_colourful_than_street(dataset: DataSet) -> None:
    weights = torch.tensor([0.299, 0.587, 0.114]).view(1, 3, 1, 1)
    x = {name: examples(dataset.domain(name), "train").x.float() for name in ("print", "street")}
    luminance = (x["print"] * weights).sum(1).flatten(1)
    assert (luminance.amax(dim=1) - luminance.amin(dim=1)).min() >= 40
    colourful = {name: (pictures.amax(dim=1) - pictures.amin(dim=1)).mean() for name, pictures in x.items()}
    assert colourful["street"] < 0.8 * colourful["print"]


def test_print_and_street_share_no_font(material: recipes.Material) -> None:
    assert not set(recipes.PRINT_FONTS) & set(recipes.STREET_FONTS)
    for name, font in material.fonts.items():
        shapes = {bytes(font.getmask(str(digit))) for digit in range(10)}
        assert len(shapes) == 10, f"{name} does not draw ten different digits"


def test_a_printed_digit_is_centred_at_its_height(material: recipes.Material) -> None:
    setting = recipes.Placement(height=20, angle=0.0, shear=0.0, shift=(0.0, 0.0))
    ink = recipes._draw_digit(8, material.fonts["DejaVuSans-Bold"], setting)
    rows, columns = np.flatnonzero(ink.max(axis=1) > 0.4), np.flatnonzero(ink.max(axis=0) > 0.4)
    assert abs(len(rows) - 20) <= 1
    assert abs((rows[0] + rows[-1]) / 2 - 13.5) <= 0.5
    assert abs((columns[0] + columns[-1]) / 2 - 13.5) <= 0.5


def test_a_shift_moves_the_digit_that_way(material: recipes.Material) -> None:
    font = material.fonts["DejaVuSans-Bold"]
    still = recipes._draw_digit(8, font, recipes.Placement(16, 0.0, 0.0, (0.0, 0.0)))
    moved = recipes._draw_digit(8, font, recipes.Placement(16, 0.0, 0.0, (2.0, -1.0)))
    assert np.allclose(np.roll(still, (-1, 2), axis=(0, 1)), moved, atol=0.02)


def test_blur_keeps_a_flat_picture_and_spreads_a_point() -> None:
    flat = np.full((28, 28, 3), 77, dtype=np.float32)
    assert np.allclose(recipes._blur(flat, 0.9), 77, atol=1e-3)
    point = np.zeros((28, 28, 3), dtype=np.float32)
    point[14, 14] = 1
    spread = recipes._blur(point, 1.0)
    assert spread.sum() == pytest.approx(3, abs=1e-4)
    assert spread[14, 14, 0] == pytest.approx(1 / (2 * np.pi), rel=0.01)
