"""Images that a table lists, with groups that are never split."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from polyfed.data.own.manifest import manifest
from polyfed.data.own.own_data import is_own_data, own_data
from polyfed.data.partitions.federate import federate
from polyfed.errors import DataError, OptionError
from polyfed.tasks.known import CLASSIFICATION, MULTILABEL, REGRESSION

PATIENTS = 12


def rows(tmp_path: Path) -> list[dict[str, str]]:
    """Two hospitals, twelve patients each with three images; the colour of an image is its patient."""
    made = []
    for place, domain in enumerate(("north", "south")):
        for patient in range(PATIENTS):
            for number in range(3):
                path = tmp_path / "files" / f"{domain}-{patient}-{number}.png"
                path.parent.mkdir(exist_ok=True)
                Image.new("RGB", (8, 8), (patient, number, place)).save(path)
                made.append(
                    {
                        "path": f"files/{path.name}",
                        "domain": domain,
                        "label": "ill" if patient % 3 == 0 else "well",
                        "group": str(patient),
                        "split": "",
                    }
                )
    return made


def table(path: Path, lines: list[dict[str, str]], columns: str = "path domain label group split", delimiter: str = ",") -> str:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns.split(), extrasaction="ignore", delimiter=delimiter)
        writer.writeheader()
        writer.writerows(lines)
    return str(path)


def patients(examples) -> set[int]:
    return set(examples.batch(slice(None))[0][:, 0, 0, 0].tolist())


def test_patients_are_never_split(tmp_path):
    data = own_data(table(tmp_path / "scans.csv", rows(tmp_path)), size=8)
    assert (data.name, data.classes) == ("scans", ("ill", "well"))
    for domain in data.domains:
        parts = [patients(part) for part in (domain.train, domain.validation, domain.test)]
        assert sum(map(len, parts)) == PATIENTS == len(set.union(*parts))
        assert 6 <= len(domain.test) <= 9 and set(domain.test.labels.tolist()) == set(domain.train.labels.tolist()) == {0, 1}
    assert "group" in data.source


def test_patients_are_clients_and_stay_whole_in_held_out_data(tmp_path):
    data = manifest(table(tmp_path / "scans.csv", rows(tmp_path)), size=8, validation_share=0.0)
    assert len(federate(data, "natural").clients) == sum(len(patients(domain.train)) for domain in data.domains)
    for client in federate(data, "domain_split(clients=2, domains_per_client=1, held_out=0.3)").clients:
        assert client.validation is not None and len(client.validation)
        assert not patients(client.train) & patients(client.validation)


def test_given_splits_and_other_separators(tmp_path):
    lines = [{**row, "split": "Test" if int(row["group"]) < 4 else "train"} for row in rows(tmp_path)]
    data = manifest(table(tmp_path / "scans.csv", lines, delimiter=";"), size=8, validation_share=0.0)
    assert [(patients(domain.test), len(domain.train)) for domain in data.domains] == [({0, 1, 2, 3}, 24)] * 2


def test_parquet(tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet", reason="needs the parquet extra: pip install 'polyfed[parquet]'")
    import pyarrow

    lines = [{**row, "label": 10 * (row["label"] == "ill") + 2} for row in rows(tmp_path)]
    parquet.write_table(pyarrow.Table.from_pylist(lines), tmp_path / "scans.parquet")
    data = own_data(str(tmp_path / "scans.parquet"), size=8)
    assert (
        data.classes == ("2", "12")
        and len(data.domains[0].train) + len(data.domains[0].validation) + len(data.domains[0].test) == 36
    )


def test_invalid_tables_are_rejected_with_the_reason(tmp_path):
    lines = rows(tmp_path)

    def refused(lines, *words, columns="path domain label group split"):
        with pytest.raises(DataError) as error:
            manifest(table(tmp_path / "t.csv", lines, columns), size=8)
        assert all(word in str(error.value) for word in words), error.value

    refused(lines, "lacks label", columns="path domain group")
    refused([], "lists no images")
    refused([{**lines[0], "label": ""}, *lines[1:]], "line 2", "the label is missing")
    refused([{**lines[0], "split": "tset"}, *lines[1:]], "line 2", "'tset'", "train, validation or test")
    refused([{**lines[0], "split": "train"}, *lines[1:]], "only some images")
    refused([*lines, lines[3]], "more than once", lines[3]["path"])
    refused([{**lines[0], "path": "files/none.png"}, *lines[1:]], "1 files that are not in", "files/none.png", 'images="FOLDER"')
    elsewhere = [{**row, "path": f"/nowhere/{row['path']}"} for row in lines]
    refused(elsewhere, "72 files that do not exist: /nowhere/files/north-0-0.png")
    torn = [{**row, "split": "test" if number % 3 == 0 else "train"} for number, row in enumerate(lines)]
    refused(torn, "splits 24 groups across", "0 of north in test and train")
    with pytest.raises(DataError, match=r"bad\.csv is not UTF-8 text \(invalid continuation byte at byte 21\)\. Save it as UTF-8"):
        (tmp_path / "bad.csv").write_bytes("path,domain,label\ncafé.png,a,b\n".encode("latin-1"))
        manifest(str(tmp_path / "bad.csv"))


def test_a_path_of_a_table_is_data(tmp_path):
    path = table(tmp_path / "scans.csv", rows(tmp_path))
    assert is_own_data(path) and not is_own_data(str(tmp_path / "none.csv")) and not is_own_data("pacs")


def test_groups_of_numpy_are_those_of_the_rule(tmp_path):
    from polyfed.data.store.splits import grouped

    labels, groups = np.array([0, 0, 0, 0, 1, 1, 1, 1]), np.array([0, 0, 1, 1, 2, 2, 3, 3])
    rest, part = grouped(labels, groups, 0.5, seed=0)
    assert len(part) == 4 and sorted([*rest, *part]) == list(range(8))
    assert labels[part].tolist() == [0, 0, 1, 1]
    assert not len(grouped(labels, groups, 0.0, seed=0)[1])
    one_each = grouped(np.array([0, 0, 1, 1]), np.array([0, 0, 1, 1]), 0.5, seed=0)
    assert not len(one_each[1]), "a class with one group stays whole, where it can be learned"


def relabelled(tmp_path: Path, labels: list[str], name: str = "scans.csv") -> str:
    """Return the table with these labels, repeated."""
    lines = [{**line, "label": labels[number % len(labels)]} for number, line in enumerate(rows(tmp_path))]
    return table(tmp_path / name, lines)


def test_several_labels_of_an_image(tmp_path):
    data = own_data(relabelled(tmp_path, ["cold | cough", "cough", "fever|cold", ""]), size=8)
    assert data.task is MULTILABEL and data.classes == ("cold", "cough", "fever")
    for domain in data.domains:
        assert not patients(domain.train) & patients(domain.test)
        seen = {tuple(row) for part in (domain.train, domain.validation, domain.test) for row in part.labels.int().tolist()}
        assert seen == {(1, 1, 0), (0, 1, 0), (1, 0, 1), (0, 0, 0)}


def test_numbers_to_predict(tmp_path):
    path = relabelled(tmp_path, ["1", "2.5", "-3e1"])
    data = own_data(path, size=8)
    assert data.task is REGRESSION and data.classes == ("value",) and not data.notes
    x, y = data.domains[0].train.batch(slice(None))
    assert y.dtype == torch.float32
    by_number = {0: 1.0, 1: 2.5, 2: -30.0}  # the green of an image is its number, and labels come in turn
    assert y.tolist() == [by_number[int(green)] for green in x[:, 1, 0, 0]]
    assert own_data(relabelled(tmp_path, ["3", "5"], "whole.csv"), size=8).task is CLASSIFICATION
    assert manifest(str(tmp_path / "whole.csv"), size=8, task="regression").task is REGRESSION
    assert set(manifest(path, size=8, task="classification").classes) == {"-3e1", "1", "2.5"}


def test_labels_that_do_not_fit_the_task_are_named(tmp_path):
    with pytest.raises(DataError, match=r"line 3: the label 'tall' is not a number. Regression requires numbers"):
        manifest(relabelled(tmp_path, ["1.5", "tall"]), task="regression")
    with pytest.raises(DataError, match=r"line 3: the label nan is not finite. Regression requires finite numbers"):
        manifest(relabelled(tmp_path, ["1.5", "nan"]))
    with pytest.raises(DataError, match=r"line 3: the label is missing"):
        manifest(relabelled(tmp_path, ["1.5", ""]), task="regression")
    with pytest.raises(OptionError, match="not segmentation"):
        manifest(relabelled(tmp_path, ["a", "b"]), task="segmentation")
    with pytest.raises(
        DataError,
        match=r"fractional numbers with 72 distinct values in 72 images, which do not look like classes. Use --task regression",
    ):
        manifest(relabelled(tmp_path, [f"{number}.5" for number in range(72)]), task="classification")


@pytest.mark.parametrize(
    ("labels", "words", "measure"),
    [(["a|b", "b", ""], (), "macro_f1"), (["1", "2", "9"], ("--task", "regression", "--lr", "0.001"), "r2")],
)
def test_a_run_on_a_table_of_another_task_is_scored_again_and_checked(polyfed, tmp_path, labels, words, measure):
    path = relabelled(tmp_path, labels)
    options = ("--rounds", "1", "--local-steps", "2", "--batch-size", "8", "--out", "r", "-q", "--json")
    found = polyfed("run", path, *words, *options).json
    assert found["metric"] == measure
    assert polyfed("evaluate", "r", path, "-q", "--json").json["accuracy"] == found["accuracy"]
    assert polyfed("data", "check", path).code == 0
    shown = polyfed("evaluate", "r", path).out
    assert ("mean absolute error" in shown) is (measure == "r2") and ("most frequent class" in shown) is (measure != "r2")
    assert "nan" not in shown
