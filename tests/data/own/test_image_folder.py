"""Images in <domain>/<class>/."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from polyfed.data.own.image_folder import image_folder
from polyfed.data.partitions.federate import federate
from polyfed.data.store.cache import cache_folder
from polyfed.errors import DataError, OptionError

KINDS = {"jpg": "JPEG", "PNG": "PNG", "bmp": "BMP", "gif": "GIF", "webp": "WEBP", "tif": "TIFF"}
DOMAINS, CLASSES = ("clinic a", "clinic_b"), ("benign", "malign")


def image(path: Path, colour, side=(12, 9), kind="PNG") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", side, tuple(colour)).save(path, kind)


def make(root: Path, per_class: int = 20) -> Path:
    for first, domain in enumerate(DOMAINS):
        for second, label in enumerate(CLASSES):
            for number in range(per_class):
                image(root / domain / label / f"{number:03d}.png", (first, second, number))
    return root


def colours(examples) -> list[tuple[int, ...]]:
    return [tuple(pixel) for pixel in examples.batch(slice(None))[0][:, :, 0, 0].tolist()]


def everything(domain) -> list[tuple[int, ...]]:
    return [pixel for part in (domain.train, domain.validation, domain.test) if part is not None for pixel in colours(part)]


def test_domains_classes_and_shares(tmp_path):
    data = image_folder(str(make(tmp_path / "scans")), size=8)
    assert data.name == "scans"
    assert data.classes == CLASSES
    assert [domain.name for domain in data.domains] == list(DOMAINS)
    for first, domain in enumerate(data.domains):
        for part, count in ((domain.train, 14), (domain.validation, 2), (domain.test, 4)):
            assert Counter(part.labels.tolist()) == {0: count, 1: count}
        assert sorted(everything(domain)) == [(first, second, number) for second in range(2) for number in range(20)]
        assert domain.train.batch(slice(0, 2))[0].shape == (2, 3, 8, 8)
    assert "28/4/8" in data.source


def test_the_split_depends_on_names_and_seed_alone(tmp_path):
    first = image_folder(str(make(tmp_path / "one")), size=8)
    second = image_folder(str(make(tmp_path / "two")), size=8)
    other = image_folder(str(tmp_path / "two"), size=8, seed=1)
    tests = [colours(data.domains[0].test) for data in (first, second, other)]
    assert tests[0] == tests[1] != tests[2]


def test_every_image_format(tmp_path):
    for domain in DOMAINS:
        for label in CLASSES:
            for number, (ending, kind) in enumerate(KINDS.items()):
                image(tmp_path / domain / label / f"{number}.{ending}", (200, 100, 50), kind=kind)
            (tmp_path / domain / label / "notes.txt").write_text("not an image")
            (tmp_path / domain / label / ".hidden.png").write_text("not an image")
        frames = [Image.new("RGB", (8, 8), colour) for colour in ((200, 100, 50), (0, 0, 0))]
        frames[0].save(tmp_path / domain / "benign" / "moving.gif", save_all=True, append_images=frames[1:])
    data = image_folder(str(tmp_path), size=4, test_share=0.3, validation_share=0.0)
    domain = data.domains[0]
    found = np.array(everything(domain))
    assert len(found) == 13
    assert np.abs(found - (200, 100, 50)).max() <= 3
    assert domain.validation is None


def test_a_domain_may_lack_classes_with_one_notice(tmp_path):
    make(tmp_path)
    for path in (tmp_path / "clinic_b" / "malign").iterdir():
        path.unlink()
    image(tmp_path / "clinic a" / "unclear" / "0.png", (0, 0, 0))
    data = image_folder(str(tmp_path))
    assert data.classes == ("benign", "malign", "unclear")
    assert set(data.domain("clinic_b").train.labels.tolist()) == {0}
    empty, lacking = data.notes
    assert empty == f"{tmp_path}: 1 empty class folder, kept in the list of classes: clinic_b/malign."
    assert "clinic_b lacks malign, unclear" in lacking and "clinic a" not in lacking
    assert federate(data).notes == data.notes


def test_files_that_are_not_read_are_counted(tmp_path):
    make(tmp_path, 3)
    for number in range(7):
        (tmp_path / "clinic a" / "benign" / f"{number}.txt").write_text("notes")
    image(tmp_path / "clinic a" / "stray.png", (0, 0, 0))
    image(tmp_path / "clinic a" / "benign" / "deeper" / "0.png", (0, 0, 0))
    others, strays = image_folder(str(tmp_path), test_share=0.4).notes
    assert "7 files skipped" in others and "and 2 more" in others
    assert "2 images skipped" in strays and "clinic a/stray.png" in strays


def test_domains_called_train_and_test_raise_a_notice(tmp_path):
    for domain in ("train", "test"):
        for label in CLASSES:
            for number in range(5):
                image(tmp_path / domain / label / f"{number}.png", (1, 2, 3))
    data = image_folder(str(tmp_path))
    assert [domain.name for domain in data.domains] == ["test", "train"]
    (note,) = data.notes
    assert "the domains are called test and train" in note


def test_a_domain_in_the_test_folder_only_can_be_unseen(tmp_path):
    make(tmp_path / "train", 4)
    make(tmp_path / "test", 4)
    for label in CLASSES:
        image(tmp_path / "test" / "clinic_c" / label / "0.png", (9, 9, 9))
    data = image_folder(str(tmp_path))
    assert "clinic_c has no training images" in data.notes[0]
    assert len(federate(data, unseen=["clinic_c"]).clients) == 2
    with pytest.raises(DataError, match="clinic_c"):
        federate(data)


def test_exif_rotation_is_applied(tmp_path):
    make(tmp_path, 5)
    pixels = np.zeros((20, 20, 3), np.uint8)
    pixels[:10] = 250  # the upper half is bright
    lying = Image.fromarray(pixels).rotate(90)
    exif = Image.Exif()
    exif[0x0112] = 6  # turn by 90 degrees clockwise to look at it
    lying.save(tmp_path / "clinic a" / "benign" / "000.png", exif=exif)
    data = image_folder(str(tmp_path), size=20, test_share=0.2, validation_share=0.0)
    x = torch.cat([part.batch(slice(None))[0] for part in (data.domains[0].train, data.domains[0].test)])
    turned = x[x.float().mean((1, 2, 3)).argmax()]
    assert (turned[:, :10] == 250).all() and (turned[:, 10:] == 0).all()


def grey(path: Path, values: np.ndarray, kind: str = "TIFF") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(values).save(path, kind)


def test_deep_images_keep_their_brightness_by_one_rule_for_a_domain(tmp_path):
    for number, level in enumerate((100, 1000, 4095)):  # of twelve bits
        for label in CLASSES:
            grey(tmp_path / "twelve bits" / label / f"{number}.png", np.full((8, 8), level, np.uint16), "PNG")
    for name, found in (("fractions", (0.1, 0.5, 1.0)), ("hounsfield", (-1000.0, 0.0, 1000.0))):
        for number, level in enumerate(found):
            for label in CLASSES:
                grey(tmp_path / name / label / f"{number}.tif", np.full((8, 8), level, np.float32))
    data = image_folder(str(tmp_path), size=8, test_share=0.3, validation_share=0.0)
    levels = {domain.name: sorted({pixel[0] for pixel in everything(domain)}) for domain in data.domains}
    assert levels == {"twelve bits": [6, 62, 255], "fractions": [26, 128, 255], "hounsfield": [0, 128, 255]}


def test_fractions_of_white_stay_bright_in_a_folder_with_sixteen_bit_images(tmp_path):
    for label in CLASSES:
        for number, level in enumerate((0.5, 1.0)):
            grey(tmp_path / "both" / label / f"{number}.tif", np.full((8, 8), level, np.float32))
        grey(tmp_path / "both" / label / "2.png", np.full((8, 8), 65535, np.uint16), "PNG")
    (domain,) = image_folder(str(tmp_path), size=8, test_share=0.3, validation_share=0.0).domains
    assert sorted({pixel[0] for pixel in everything(domain)}) == [128, 255]


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGBA", "CMYK", "YCbCr"])
def test_modes_become_rgb(tmp_path, mode):
    make(tmp_path, 4)
    shown = Image.new("RGB", (8, 8), (255, 255, 255)).convert(mode)
    shown.save(tmp_path / "clinic a" / "benign" / "000.tif", "TIFF")
    data = image_folder(str(tmp_path), size=8, test_share=0.3)
    assert (255, 255, 255) in everything(data.domains[0])


def test_unreadable_images_are_named_and_counted(tmp_path):
    make(tmp_path)
    whole = (tmp_path / "clinic a" / "benign" / "003.png").read_bytes()
    (tmp_path / "clinic a" / "benign" / "003.png").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "clinic a" / "malign" / "004.png").write_bytes(b"")
    with pytest.raises(DataError, match=r"clinic a: 2 images cannot be read.*benign/003\.png.*malign/004\.png"):
        image_folder(str(tmp_path))
    for _ in range(2):  # decoded, and from the cache
        data = image_folder(str(tmp_path), skip_unreadable=True)
        assert len(everything(data.domains[0])) == 38
        assert "2 unreadable images skipped: clinic a/benign/003.png, clinic a/malign/004.png" in data.source


def test_a_class_of_unreadable_images_only_is_an_error_even_when_skipping(tmp_path):
    make(tmp_path, per_class=3)
    for path in (tmp_path / "clinic_b" / "malign").iterdir():
        path.write_bytes(b"x")
    with pytest.raises(DataError, match="none of the malign images of the domain clinic_b can be read"):
        image_folder(str(tmp_path), skip_unreadable=True)


def test_train_and_test_folders_are_the_splits(tmp_path):
    make(tmp_path / "train", 10)
    make(tmp_path / "test", 4)
    data = image_folder(str(tmp_path), size=8)
    assert [domain.name for domain in data.domains] == list(DOMAINS)
    for first, domain in enumerate(data.domains):
        assert sorted(colours(domain.test)) == [(first, second, number) for second in range(2) for number in range(4)]
        assert (len(domain.train), len(domain.validation)) == (18, 2)
    make(tmp_path / "val", 3)
    data = image_folder(str(tmp_path), size=8)
    assert [(len(domain.train), len(domain.validation)) for domain in data.domains] == [(20, 6)] * 2


def test_a_domain_without_test_images_is_named(tmp_path):
    make(tmp_path / "train", 4)
    make(tmp_path / "test", 4)
    for path in sorted((tmp_path / "test" / "clinic_b").rglob("*.png")):
        path.unlink()
    with pytest.raises(DataError, match="domain clinic_b has no test images"):
        image_folder(str(tmp_path))


def test_decoded_once_and_again_when_a_file_changes(tmp_path):
    make(tmp_path)
    image_folder(str(tmp_path), size=8)
    before = sorted(path.name for path in cache_folder().iterdir())
    image_folder(str(tmp_path), size=8, seed=5, test_share=0.5)
    assert sorted(path.name for path in cache_folder().iterdir()) == before, "another split decodes nothing again"
    image(tmp_path / "clinic a" / "benign" / "000.png", (9, 9, 9), (30, 30))
    assert (9, 9, 9) in everything(image_folder(str(tmp_path), size=8).domains[0])


def test_folders_without_data_are_rejected(tmp_path):
    with pytest.raises(DataError, match="does not exist"):
        image_folder(str(tmp_path / "none"))
    with pytest.raises(DataError, match=r"has no images in <domain>/<class>/.*empty"):
        image_folder(str(tmp_path))
    image(tmp_path / "a" / "cat" / "1.png", (0, 0, 0))
    with pytest.raises(DataError, match="only one class, cat"):
        image_folder(str(tmp_path))


@pytest.mark.parametrize("options", [{"size": 0}, {"seed": -1}, {"test_share": 1.0}, {"test_share": 0.6, "validation_share": 0.5}])
def test_options_are_checked(tmp_path, options):
    with pytest.raises(OptionError):
        image_folder(str(tmp_path), **options)
