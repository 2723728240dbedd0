"""A data set is one declaration: signature, documentation, checks and placeholders follow from it."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from polyfed.core.data_types import DatasetExamples, Domain
from polyfed.data.check import check
from polyfed.data.declaration import (
    DataOption,
    Declaration,
    augment_option,
    normalise_option,
    registered,
    size_option,
    validation_option,
)
from polyfed.data.placeholders import blank_federation
from polyfed.data.registry import data_sets
from polyfed.data.store.domain_files import Duplicates
from polyfed.errors import DataError, OptionError

DOMAINS = ("north", "south")


@dataclass(frozen=True)
class Streamed:
    """A domain whose images are read one by one, not decoded into arrays."""

    domain: str
    size: int
    layout: str = "folder tiny/<domain>"
    problems: tuple[str, ...] = ()
    middle_square: bool = True

    def load(self) -> Domain:
        items = [(torch.zeros(3, self.size, self.size, dtype=torch.uint8), label) for label in (0, 1, 0)]
        return Domain(self.domain, DatasetExamples(items), DatasetExamples(items[:1]))

    def count(self, classes: int, unreadable: list[str], duplicates: Duplicates) -> dict[str, tuple[int, ...]]:
        return {"train": (2, 1), "test": (1, 0)}


def find(root: Path, size: int, colour: str, whole: bool = False) -> list[Streamed]:
    """The domains that have a folder; ``whole`` is for checks."""
    assert colour == "red" and whole == (size == 5)
    return [Streamed(domain, size) for domain in DOMAINS if (root / "tiny" / domain).is_dir()]


TINY = Declaration(
    name="tiny",
    about="""Tiny: two domains.

    It is not real.
    """,
    title="Tiny",
    domains=DOMAINS,
    classes=("a", "b"),
    splits="none",
    terms="none",
    citation="none",
    layouts=("folder tiny/<domain>", "nothing else"),
    expected={"folder tiny/<domain>": {"north": {"train": 3}, "south": {"train": (2, 2)}}},
    default_model="small_cnn",
    options=(
        size_option(4, "Side."),
        DataOption("colour", "red", "A colour.", note=lambda colour: f"in {colour}"),
        augment_option("none"),
        normalise_option("half"),
    ),
    find=find,
    check_with={"size": 5, "whole": True},
)


@pytest.fixture(autouse=True)
def registered_for_a_test(monkeypatch: pytest.MonkeyPatch) -> None:
    data_sets.names()
    monkeypatch.setattr(data_sets, "_records", dict(data_sets._records))
    registered(TINY)


@pytest.fixture
def root(tmp_path: Path) -> str:
    for domain in DOMAINS:
        (tmp_path / "tiny" / domain).mkdir(parents=True)
    return str(tmp_path)


def test_the_function_has_the_signature_and_the_documentation_of_the_options() -> None:
    record = data_sets.find("tiny")
    assert [(p.name, p.default) for p in record.signature.parameters.values()] == [
        ("root", inspect.Parameter.empty),
        ("size", 4),
        ("colour", "red"),
        ("augment", "none"),
        ("normalise", "half"),
        ("per_domain", 0),
    ]
    assert record.doc == (
        "Tiny: two domains.\n\nIt is not real.\n\nArgs:\n    root: Folder that contains the files.\n    size: Side.\n    colour: A colour.\n"
        "    augment: Augmentation of training batches.\n    normalise: Normalisation.\n    per_domain: Training images kept per domain, "
        "drawn with seed 0; 0 means all. Validation and test images are not affected."
    )
    assert (record.build.__module__, record.build.__name__) == (__name__, "tiny")


def test_a_source_that_streams_makes_a_data_set(root: str) -> None:
    data = data_sets.build("tiny(size=6)", root=root)
    assert (data.name, data.classes, data.default_model) == ("Tiny", ("a", "b"), "small_cnn")
    assert data.source == "folder tiny/<domain>: north 3/0/1, south 3/0/1 (train/validation/test); 6x6 pixels; in red"
    assert data.domains[0].train.batch(slice(0, 2))[0].shape == (2, 3, 6, 6)


def test_per_domain_keeps_some_training_images_and_every_other_one(root: str) -> None:
    whole, two, one = (data_sets.build(f"tiny(per_domain={kept})", root=root) for kept in (0, 2, 1))
    assert [[len(domain.train) for domain in data.domains] for data in (whole, two, one)] == [[3, 3], [2, 2], [1, 1]]
    assert [[len(domain.test) for domain in data.domains] for data in (whole, two, one)] == [[1, 1]] * 3
    assert "per domain" not in whole.source and two.source.endswith("; at most 2 training images per domain")
    with pytest.raises(OptionError, match="tiny: per_domain must be at least 0, got -1"):
        data_sets.build("tiny(per_domain=-1)", root=root)


def test_options_are_checked_before_files(tmp_path: Path) -> None:
    for text, words in (
        ("tiny(size=0)", "size must be at least 1"),
        ('tiny(normalise="x")', "Unknown normalisation"),
        ("tiny(side=1)", "no option"),
    ):
        with pytest.raises(OptionError, match=words):
            data_sets.build(text, root=str(tmp_path / "none"))
    with pytest.raises(DataError, match=r"Tiny was not found in .*\(1\) folder tiny/<domain>; \(2\) nothing else"):
        data_sets.build("tiny", root=str(tmp_path))
    with pytest.raises(OptionError, match=r"validation must be .* below 1"):
        validation_option("A share.").check("tiny", 1.0)


def test_the_check_counts_all_data_as_published(root: str) -> None:
    assert check("tiny", root).problems == ("south, train: 1 images of the class b, expected 2.",)


def test_placeholders_have_the_declared_size() -> None:
    record = data_sets.find("tiny")
    for text, side in (("tiny", 4), ("tiny(size=9)", 9)):
        federation = blank_federation(text, record, ("south",))
        assert [client.id for client in federation.clients] == ["north"]
        assert federation.sample_input().shape[1:] == (3, side, side)
