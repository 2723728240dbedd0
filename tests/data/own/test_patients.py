"""Columns that look like patients: rejected until the option ``group`` decides; unused columns are named."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
from PIL import Image

from helpers.command_line import Command, says
from polyfed.data.own.own_data import own_data
from polyfed.data.own.table_columns import LIKELY, _likelihood
from polyfed.data.registry import data_sets
from polyfed.errors import DataError

PATIENTS, IMAGES_EACH = 10, 4
QUICK = ("--rounds", "1", "--local-steps", "1", "--batch-size", "4", "--out", "r", "-q")


def table(folder: Path, **columns: str) -> Path:
    """A table of two hospitals; the red of an image is its patient. ``columns`` maps names to patient, number, or a text."""
    lines = []
    for place, domain in enumerate(("north", "south")):
        for patient in range(PATIENTS):
            for number in range(IMAGES_EACH):
                path = folder / f"{domain}-{patient}-{number}.png"
                Image.new("RGB", (8, 8), (patient, number, place)).save(path)
                known = {"patient": f"p{patient}", "number": f"{domain}{patient}-{number}"}
                line = {"path": path.name, "domain": domain, "label": ("well", "ill")[patient % 2]}
                lines.append(line | {name: known.get(what, what) for name, what in columns.items()})
    with (folder / "scans.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, lines[0])
        writer.writeheader()
        writer.writerows(lines)
    return folder / "scans.csv"


def torn(data) -> int:
    """Return the number of patients with images in more than one split."""
    count = 0
    for domain in data.domains:
        parts = [set(part.batch(slice(None))[0][:, 0, 0, 0].tolist()) for part in (domain.train, domain.validation, domain.test)]
        count += sum(len(parts[one] & parts[other]) for one, other in ((0, 1), (0, 2), (1, 2)))
    return count


@pytest.mark.parametrize("column", ["patient_id", "Patient", "SUBJECT_ID", "case", "Study", "slide id", "lesion_id", "PatientID"])
def test_a_likely_group_column_must_be_decided(polyfed: Command, tmp_path: Path, column: str) -> None:
    table(tmp_path, **{column: "patient"})
    name = column.lower()
    wanted = f'manifest(root="scans.csv", group="{name}")'
    for command in (("run",), ("data", "check"), ("doctor",), ("compare", "--methods", "fedavg; fedbn")):
        says(polyfed(*command, "scans.csv"), f"column {name}", wanted, 'group=""')
    assert torn(data_sets.build(wanted.replace("scans.csv", str(tmp_path / "scans.csv")))) == 0
    assert torn(own_data(str(tmp_path / "scans.csv"), group="")) > 0, "without the check, patients would leak"


def test_both_decisions_can_be_typed_at_each_command(polyfed: Command, tmp_path: Path) -> None:
    table(tmp_path, patient_id="patient")
    for group in ("patient_id", ""):
        data = f'manifest(root="scans.csv", size=16, group="{group}")'
        shown = polyfed("data", "check", data, "--json")
        assert shown.code == 0 and shown.json["counts"]["north"]["all"] == [20, 20]
        assert any("patient_id" in note for note in shown.json["notes"]) is (group == "")
    test = polyfed("data", "check", 'manifest(root="scans.csv", group="patient_id", test_share=0.4)', "--json").json["counts"]
    assert sum(test["north"]["test"]) % IMAGES_EACH == 0 and sum(test["north"]["test"]) >= 12
    assert polyfed("run", data.replace('""', '"patient_id"'), *QUICK).code == 0
    assert polyfed("evaluate", "r", "-q").code == 0


def test_unused_columns_are_named_and_harmless_columns_accepted(polyfed: Command, tmp_path: Path) -> None:
    table(tmp_path, patient_age="40", Scanner="x", case_id="number")
    shown = polyfed("data", "check", "scans.csv")
    assert shown.code == 0 and "scans.csv: unused columns: patient_age, scanner, case_id." in shown.out
    assert "unused columns: patient_age, scanner, case_id" in polyfed("run", "scans.csv", *QUICK[:-1]).err


def test_a_group_column_decides(tmp_path: Path) -> None:
    data = own_data(str(table(tmp_path, group="patient", patient_id="patient")))
    assert torn(data) == 0 and data.notes == (f"{tmp_path / 'scans.csv'}: unused column: patient_id.",)


def test_columns_of_a_table_can_have_other_names(polyfed: Command, tmp_path: Path) -> None:
    path = table(tmp_path, subject="patient")
    path.write_text(path.read_text().replace("path,domain,label", "File,Site,Diagnosis"))
    columns = 'path="file", domain="Site", label="diagnosis", group="subject"'
    data = data_sets.build(f'manifest(root="{path}", size=8, {columns})')
    assert [domain.name for domain in data.domains] == ["north", "south"] and data.classes == ("ill", "well") and torn(data) == 0
    says(polyfed("run", 'manifest(root="scans.csv", group="subjects")'), "it lacks path, domain, label, subjects", "path=...")
    says(polyfed("run", f'manifest(root="scans.csv", {columns.replace("subject", "subjekt")})'), "lacks subjekt", "subject")


def test_a_run_from_before_the_check_is_scored_again(polyfed: Command, tmp_path: Path) -> None:
    table(tmp_path)
    before = polyfed("run", "scans.csv", *QUICK, "--json").json["accuracy"]
    lines = (tmp_path / "scans.csv").read_text().splitlines()
    marked = [f"{line},{'patient' if number == 0 else line.split('-')[1]}" for number, line in enumerate(lines)]
    (tmp_path / "scans.csv").write_text("\n".join(marked))
    assert polyfed("evaluate", "r", "-q", "--json").json["accuracy"] == before
    says(polyfed("evaluate", "r", "scans.csv"), "column patient")


def test_a_copy_of_hugging_face(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets", reason="needs the extra polyfed[huggingface]")
    image = [Image.new("RGB", (8, 8), (row // 4, row, 0)) for row in range(40)]
    columns = {
        "image": image,
        "label": [row // 4 % 2 for row in range(40)],
        "patient": [row // 4 for row in range(40)],
        "age": [1] * 40,
    }
    features = datasets.Features(
        image=datasets.Image(), label=datasets.Value("int64"), patient=datasets.Value("int64"), age=datasets.Value("int64")
    )
    datasets.Dataset.from_dict(columns, features=features).save_to_disk(tmp_path / "copy")
    with pytest.raises(DataError, match=r"column patient, .* 'huggingface\(root=.*copy\", group=\"patient\"\)'"):
        own_data(str(tmp_path / "copy"))
    data = own_data(str(tmp_path / "copy"), group="patient")
    assert torn(data) == 0 and data.notes == (f"{tmp_path / 'copy'}: unused column: age.",)
    assert torn(own_data(str(tmp_path / "copy"), group="")) > 0


def test_names_of_groups() -> None:
    assert all(_likelihood(word) is not None and _likelihood(f"{word}_ID") is not None for word in LIKELY)
    others = ("id", "image_id", "site", "age", "sex", "patient_age", "study_date", "slide_scanner", "caseload", "filename", "idx")
    assert not [word for word in others if _likelihood(word) is not None]
