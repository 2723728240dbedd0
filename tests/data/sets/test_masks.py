"""Images with masks: crops that move both, CamVid, Cityscapes and own folders in tiny copies of their layouts, and what is refused."""

from __future__ import annotations

import shutil
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import polyfed
from polyfed.data.augment import CropAndFlip
from polyfed.data.check import check
from polyfed.data.own.mask_folder import mask_folder
from polyfed.data.sets.camvid import camvid
from polyfed.data.sets.cityscapes import cityscapes
from polyfed.data.sets.class_and_domain import class_and_domain
from polyfed.errors import DataError
from polyfed.tasks.known import MULTILABEL, SEGMENTATION
from polyfed.tasks.segmentation import IGNORED


def draw(image: Path, mask: Path, seed: int, side: tuple[int, int] = (12, 16), values: tuple[int, ...] = (0, 1, 11)) -> None:
    """An image whose red channel is its mask, so that wrong pairs are detected."""
    pixels = np.random.default_rng(seed).choice(np.array(values, np.uint8), size=side)
    for path, array in ((image, np.stack([pixels, pixels, pixels], axis=2)), (mask, pixels)):
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(array).save(path)


def camvid_copy(root: Path) -> Path:
    """Five frames of each drive, in the folders that the real ones lie in."""
    places = {"0001TP": ("train", "test"), "0006R0": ("train",), "0016E5": ("train", "val"), "Seq05VD": ("test",)}
    for drive, parts in places.items():
        for frame in range(5):
            part, name = parts[frame % len(parts)], f"{drive}_{frame * 30 + 5:06d}.png"
            draw(root / "CamVid" / part / name, root / "CamVid" / f"{part}annot" / name, frame)
    return root


def test_crops_and_flips_move_image_and_mask_together() -> None:
    torch.manual_seed(0)
    mask = torch.arange(6 * 8).view(1, 6, 8).repeat(5, 1, 1)
    x, y = CropAndFlip(side=4)(mask[:, None].repeat(1, 3, 1, 1), mask)
    assert x.shape == (5, 3, 4, 4) and y.shape == (5, 4, 4)
    assert torch.equal(x[:, 0], y) and torch.equal(x[:, 2], y)
    assert len({int(corner) for corner in y[:, 0, 0]}) > 1, "every image is cropped at a different position"
    whole, _ = CropAndFlip(side=0, flip=False)(x, y)
    assert torch.equal(whole, x)
    with pytest.raises(DataError, match="must have the same size"):
        CropAndFlip(4)(torch.zeros(1, 3, 8, 8), torch.zeros(1, 6, 8))


def test_camvid_is_read_by_drive_in_the_order_of_time(tmp_path: Path) -> None:
    found = camvid(str(camvid_copy(tmp_path)), height=12, crop=8)
    assert [domain.name for domain in found.domains] == ["0001TP", "0006R0", "0016E5", "Seq05VD"]
    assert found.task is SEGMENTATION and len(found.classes) == 11
    assert [(len(domain.train), len(domain.test)) for domain in found.domains] == [(4, 1)] * 4
    x, y = found.domains[0].train.batch(slice(None))
    assert x.shape == (4, 3, 12, 16) and y.dtype == torch.uint8
    assert set(y.unique().tolist()) == {0, 1, IGNORED}, "the value 11 has no class"
    assert torch.equal(x[:, 0][y != IGNORED], y[y != IGNORED])
    prepared, masks = found.preparation.pair_for_training(x, y)
    assert prepared.shape == (4, 3, 8, 8) and masks.shape == (4, 8, 8)


def test_camvid_as_published_and_packed(tmp_path: Path) -> None:
    camvid_copy(tmp_path / "files")
    (tmp_path / "packed").mkdir()
    with tarfile.open(tmp_path / "packed" / "camvid_192x144.tar", "w") as archive:
        archive.add(tmp_path / "files" / "CamVid", "camvid")
    found = camvid(str(tmp_path / "packed"), height=12, split="original")
    drive = found.domain("0016E5")
    assert drive.validation is not None and (len(drive.train), len(drive.validation), len(drive.test)) == (3, 2, 0)
    assert len(found.domain("Seq05VD").test) == 5
    problems = check("camvid", str(tmp_path / "packed")).problems
    assert any("has the wrong checksum" in text for text in problems) and any("5 images, expected 124" in text for text in problems)


def test_a_truncated_mask_is_named(tmp_path: Path) -> None:
    root = camvid_copy(tmp_path)
    broken = next((root / "CamVid" / "trainannot").glob("0006R0*"))
    broken.write_bytes(broken.read_bytes()[:40])
    with pytest.raises(DataError, match=f"0006R0: 1 pair cannot be read.*{broken.name}"):
        camvid(str(root), height=12)


def cityscapes_copy(root: Path) -> Path:
    """Four scenes of three cities, in the folders that the real ones lie in."""
    for part, city in (("train", "aachen"), ("train", "ulm"), ("val", "lindau")):
        for scene in range(4):
            stem = f"{city}_{scene:06d}_000019"
            image = root / "leftImg8bit" / part / city / f"{stem}_leftImg8bit.png"
            draw(image, root / "gtFine" / part / city / f"{stem}_gtFine_labelIds.png", scene, (8, 16), (7, 11, 5))
    return root


def test_cityscapes_is_read_from_its_archives_as_from_the_folder(tmp_path: Path) -> None:
    folder = cityscapes_copy(tmp_path / "unpacked")
    for name in ("leftImg8bit", "gtFine"):
        shutil.make_archive(str(tmp_path / "archives" / f"{name}_trainvaltest"), "zip", folder, name)
    packed, unpacked = (cityscapes(str(place), height=8).domains for place in (tmp_path / "archives", folder))
    for one, other in zip(packed, unpacked, strict=True):
        assert one.name == other.name
        assert all(torch.equal(a, b) for a, b in zip(one.test.batch(slice(None)), other.test.batch(slice(None)), strict=True))
    assert "zurich: no files of this domain were found." in check("cityscapes", str(tmp_path / "archives")).problems
    (tmp_path / "archives" / "gtFine_trainvaltest.zip").unlink()
    with pytest.raises(DataError, match=r"Cityscapes was not found.*the folder contains leftImg8bit_trainvaltest\.zip"):
        cityscapes(str(tmp_path / "archives"))


def test_cityscapes_has_one_client_for_each_city(tmp_path: Path) -> None:
    cityscapes_copy(tmp_path)
    found = cityscapes(str(tmp_path), height=8, crop=0)
    assert [domain.name for domain in found.domains] == ["aachen", "ulm", "lindau"] and len(found.classes) == 19
    _, y = found.domains[0].train.batch(slice(None))
    assert set(y.unique().tolist()) == {0, 2, IGNORED}, "ids 7 and 11 are road and building, 5 is left out"
    assert len(found.domain("lindau").train) == 0 and len(found.domain("lindau").test) == 4
    with pytest.raises(DataError, match=r"these clients have no training data: lindau\..*--unseen NAME"):
        polyfed.run(found, "fedbn", model="small_unet(width=2)", rounds=1)
    result = polyfed.run(found, "fedbn", model="small_unet(width=2)", rounds=1, batch_size=3, unseen=("lindau",), out=None)
    assert sorted(client.id for client in result.experiment.federation.clients) == ["aachen", "ulm"]
    assert set(result.table("mean_iou")["unseen"]) == {"lindau"}


@pytest.mark.parametrize("by_domain", [True, False])
def test_own_folders_of_images_and_masks(tmp_path: Path, by_domain: bool) -> None:
    for domain in ("north", "south"):
        for number in range(5):
            places = [f"{domain}/{kind}" if by_domain else f"{kind}/{domain}" for kind in ("images", "masks")]
            draw(*(tmp_path / "own" / place / f"{number}.png" for place in places), seed=number, values=(0, 1, 2))
    (tmp_path / "own" / "classes.txt").write_text("ground\nriver\ntree\n")
    result = polyfed.run(str(tmp_path / "own"), "fedavg", model="small_unet(width=2)", rounds=1, batch_size=4, out=None)
    federation = result.experiment.federation
    assert federation.task is SEGMENTATION and federation.classes == ("ground", "river", "tree")
    assert sorted(client.id for client in federation.clients) == ["north", "south"]
    assert result.headline.measure == "mean_iou"


def test_masks_of_one_thing_and_unpaired_files(tmp_path: Path) -> None:
    for number in range(4):
        draw(tmp_path / "images" / f"{number}.png", tmp_path / "masks" / f"{number}.png", number, values=(0, 255))
    found = mask_folder(str(tmp_path), height=12, width=16)
    assert found.classes == ("0", "1") and set(found.domains[0].train.labels.unique().tolist()) == {0, 1}
    (tmp_path / "masks" / "2.png").unlink()
    with pytest.raises(DataError, match=r"images/2\.png has no counterpart in masks/"):
        mask_folder(str(tmp_path))
    Image.new("RGB", (16, 12)).save(tmp_path / "masks" / "2.png")
    with pytest.raises(DataError, match="a mask with the colour mode RGB"):
        mask_folder(str(tmp_path))


def test_a_mask_of_another_shape_is_refused_and_a_smaller_one_is_not(tmp_path: Path) -> None:
    for number in range(4):
        draw(tmp_path / "images" / f"{number}.png", tmp_path / "masks" / f"{number}.png", number, (12, 16), (0, 1))
    Image.fromarray(np.zeros((6, 8), np.uint8)).save(tmp_path / "masks" / "1.png")
    assert not mask_folder(str(tmp_path), height=12, width=16).notes
    Image.fromarray(np.zeros((16, 12), np.uint8)).save(tmp_path / "masks" / "2.png")
    with pytest.raises(DataError, match=r"masks/2\.png has 12x16 pixels, but its image images/2\.png has 16x12.*same aspect ratio"):
        mask_folder(str(tmp_path), height=12, width=16)


def test_masks_in_shades_of_grey_raise_a_notice(tmp_path: Path) -> None:
    for number in range(4):
        draw(tmp_path / "images" / f"{number}.png", tmp_path / "masks" / f"{number}.png", number, values=(0, 80, 160))
    (note,) = mask_folder(str(tmp_path), height=12, width=16).notes
    assert "contain the values 0, 80, 160, which makes 161 classes, 158 of them without any pixel" in note
    (tmp_path / "classes.txt").write_text("\n".join(f"class {number}" for number in range(161)))
    assert not mask_folder(str(tmp_path), height=12, width=16).notes


def test_deep_images_with_masks_are_scaled_by_one_rule_for_a_domain(tmp_path: Path) -> None:
    """Twelve bits: the levels 100, 1000 and 4095 are 6, 62 and 255 of 255, as in folders of classes, whatever each file holds alone."""
    for domain, levels in (("a", (100, 1000, 4095)), ("b", (40_000, 100, 65_535))):
        for number, level in enumerate(levels):
            draw(tmp_path / domain / "images" / f"{number}.png", tmp_path / domain / "masks" / f"{number}.png", number)
            Image.fromarray(np.full((12, 16), level, np.uint16)).save(tmp_path / domain / "images" / f"{number}.png")
    Image.new("RGB", (16, 12), (9, 9, 9)).save(tmp_path / "a" / "images" / "3.png")
    shutil.copy(tmp_path / "a" / "masks" / "0.png", tmp_path / "a" / "masks" / "3.png")
    found = mask_folder(str(tmp_path), height=12, width=16, test_share=0.3)
    shown = {
        domain.name: sorted({int(value) for part in (domain.train, domain.test) for value in part.batch(slice(None))[0].unique()})
        for domain in found.domains
    }
    assert shown == {"a": [6, 9, 62, 255], "b": [0, 156, 255]}


def test_class_and_domain_gives_every_example_both_labels() -> None:
    found = class_and_domain("digits-mini")
    assert found.task is MULTILABEL and len(found.classes) == 10 + len(found.domains)
    first = found.domains[0].train
    assert torch.equal(first.labels.sum(dim=1), torch.full((len(first),), 2))
    assert bool(first.labels[:, 10].all()) and not bool(first.labels[:, 11].any())
