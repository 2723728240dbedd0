"""Check per-method settings in expressions, in Python and in recipes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import polyfed as package
from helpers.command_line import Command, says
from polyfed.core.method import Method
from polyfed.errors import SettingError
from polyfed.runs.folder.run_folder import RunFolder
from polyfed.studies.compare.candidates import candidates
from polyfed.studies.compare.recipes import read

TINY = {"rounds": 1, "batch_size": 8, "model": "small_cnn(width=4)"}
DATA = "digits-mini(per_domain=10)"
RECIPE = """\
[settings]
data = "digits-mini(per_domain=10)"
model = "small_cnn(width=4)"
rounds = 1

[methods]
"fedavg" = {}
"fedbn + agc(clip=1.0)" = { lr = 0.2, schedule = "cosine" }
"""


def test_all_ways_of_writing_say_the_same() -> None:
    wanted = ["fedavg", "fedbn with lr=0.2, schedule=steps(at=(0.5, 0.75))"]
    own = {"lr": 0.2, "schedule": "steps(at=(0.5, 0.75))"}
    for given in (
        "fedavg; fedbn with lr=0.2, schedule=steps(at=(0.5, 0.75))",
        wanted,
        {"fedavg": {}, "fedbn": own},
        ["fedavg", ("fedbn", own)],
        ["fedavg", (package.parse("fedbn"), own)],
    ):
        found = candidates(given)
        assert list(found) == wanted
        assert [one.text for one in found.values()] == ["fedavg", "fedbn"] and found[wanted[1]].own == own
    assert list(candidates(("fedbn", {"lr": 0.2}))) == ["fedbn with lr=0.2"]
    assert list(candidates("fedavg; fedavg with lr=0.1; fedavg")) == ["fedavg", "fedavg with lr=0.1"]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("fedavg with", "no setting after 'with'"),
        ("fedavg with lr", "must be key=value"),
        ("fedavg with lrr=1", "Did you mean lr"),
        ("fedavg with rounds=3", "all runs have the same length"),
        ("fedavg with data=pacs", "only training settings can differ"),
        ("fedavg with lr=1, lr=2", "sets lr twice"),
        (("fedavg with lr=1", {"lr": 2}), "sets lr twice"),
        (("fedavg; fedbn", {"lr": 2}), "apply to one method; got 2"),
        ([3], "must hold method expressions"),
        ([], "No methods"),
    ],
)
def test_invalid_per_method_settings_are_refused(given: object, words: str) -> None:
    with pytest.raises(SettingError, match=words):
        candidates(given)


def test_a_method_given_as_a_value_keeps_its_settings() -> None:
    mine = Method("mine")
    (one,) = candidates([(mine, {"lr": 0.3})]).values()
    assert one.value is mine and one.method is mine and one.label == "mine with lr=0.3"


def test_runs_and_the_table_have_per_method_settings(tmp_path: Path) -> None:
    found = package.compare(DATA, "fedavg; fedavg with lr=0.2, momentum=0.5; fedbn", out=tmp_path, **TINY)
    labels = ["fedavg", "fedavg with lr=0.2, momentum=0.5", "fedbn"]
    assert [row.method for row in found.rows] == labels and all(label in repr(found) for label in labels)
    rates = [(s.lr, s.momentum) for s in (RunFolder(row.runs[0]).settings() for row in found.rows)]
    assert rates == [(0.05, 0.0), (0.2, 0.5), (0.05, 0.0)]
    assert "lr 0.05, sgd: from digits-mini; batch 8: given, except for per-method settings" in found.note
    told = found.as_json()["methods"]
    assert [one["own_settings"] for one in told] == [{}, {"lr": 0.2, "momentum": 0.5}, {}]
    assert [cost.extra_traffic for cost in found.costs][:2] == [0.0, 0.0]  # set beside the first fedavg
    again = package.compare(DATA, {"fedavg": {"lr": 0.2, "momentum": 0.5}}, out=tmp_path, **TINY)
    assert again.reused == 1 and again.rows[0].runs == found.rows[1].runs
    assert again.costs[0].extra_traffic == 0.0  # fedavg is the reference also where it has settings of its own


def test_a_recipe_has_per_method_settings(tmp_path: Path, polyfed: Command) -> None:
    file = tmp_path / "r.toml"
    file.write_text(RECIPE)
    assert read(str(file)).methods == {"fedavg": {}, "fedbn + agc(clip=1.0)": {"lr": 0.2, "schedule": "cosine"}}
    done = polyfed("compare", "--recipe", file, "--out", "c", "--json")
    assert done.code == 0, done.err
    assert [one["method"] for one in done.json["methods"]] == ["fedavg", "fedbn + agc(clip=1.0) with lr=0.2, schedule=cosine"]
    local = polyfed("compare", "--recipe", file, "--methods", "local", "--out", "d", "--json", "-q").json
    assert local["methods"][0]["method"] == "local"
    says(polyfed("compare", DATA), "--methods", "[methods]")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('"fedbn" = { lrr = 0.2 }', "Did you mean lr"),
        ('"fedbn" = { rounds = 2 }', "the same length"),
        ('"fedbn" = { lr = "fast" }', "lr must be a number"),
        ('"fedbn" = 3', "must be a table of per-method settings"),
    ],
)
def test_errors_in_per_method_settings_have_a_line_number(tmp_path: Path, line: str, words: str) -> None:
    file = tmp_path / "r.toml"
    file.write_text(f"{RECIPE}{line}\n")
    with pytest.raises(SettingError, match=rf"^{re.escape(str(file))}: line 9: .*{words}"):
        read(str(file))


def test_an_unknown_method_of_a_recipe_is_refused_before_training(tmp_path: Path, polyfed: Command) -> None:
    (tmp_path / "r.toml").write_text(f'{RECIPE}"fedbm" = {{}}\n')
    says(polyfed("compare", "--recipe", "r.toml", "--out", "c"), "Did you mean fedbn")
    assert not (tmp_path / "c").exists()
