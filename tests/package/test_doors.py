"""The doors for Python do what the commands of the same names do: the same numbers, the same JSON, the same files."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import polyfed as pf
from helpers.command_line import Command
from polyfed.core.data_types import DataSet
from polyfed.data.registry import data_sets
from polyfed.errors import PolyfedError, SettingError
from polyfed.runs.assemble import build_federation
from polyfed.runs.callbacks.callback import RunState
from polyfed.runs.folder.run_folder import RunFolder
from polyfed.settings import Settings
from polyfed.studies.compare.candidates import is_registered
from polyfed.testing import TinyNet, tiny_federation

DATA = "digits-mini(per_domain=20)"
SHORT: dict[str, Any] = {"rounds": 1, "batch_size": 8, "model": "small_cnn(width=4)"}
OPTIONS = ("--rounds", "1", "--batch-size", "8", "--model", "small_cnn(width=4)")
VARYING = ("seconds", "costs", "out", "runs")
"""What differs between two comparisons that trained the same: times, memory and folders."""


class Heard(pf.Callback):
    def __init__(self) -> None:
        self.begun: list[tuple[str, int, int]] = []
        self.ended = 0
        self.notices: list[str] = []
        self.rounds = 0

    def begin(self, run: RunState) -> None:
        self.begun.append((run.label, run.number, run.total))

    def after_round(self, run: RunState) -> None:
        self.rounds += 1

    def end(self, result: pf.Result) -> None:
        self.ended += 1

    def message(self, text: str) -> None:
        self.notices.append(text)


@pytest.fixture(scope="module")
def digits() -> DataSet:
    made: DataSet = data_sets.build(DATA)
    return made


def numbers(found: dict[str, Any]) -> dict[str, Any]:
    methods = [{key: value for key, value in row.items() if key not in VARYING} for row in found["methods"]]
    return {**{key: value for key, value in found.items() if key not in VARYING}, "methods": methods}


def test_compare_is_the_command(polyfed: Command, capsys: pytest.CaptureFixture[str]) -> None:
    printed = polyfed("compare", DATA, "--methods", "fedavg; fedbn", *OPTIONS, "--seeds", "2", "-q", "--json").json
    heard = Heard()
    written = pf.compare(DATA, ["fedavg", pf.parse("fedbn")], seeds=2, out=printed["out"], callbacks=[heard], **SHORT)
    assert written.as_json() == printed  # the finished runs are read back
    assert written.reused == written.planned == 4 and heard.rounds == 0
    assert heard.begun[0] == ("fedavg, seed 0", 1, 4) and heard.ended == 4
    capsys.readouterr()
    fresh = pf.compare(DATA, "fedavg; fedbn", seeds=2, **SHORT)
    assert capsys.readouterr() == ("", "")
    assert numbers(fresh.as_json()) == numbers(printed)
    assert fresh.folder is None and fresh.rows[0].runs == () and fresh.reused == 0
    assert json.loads(json.dumps(fresh.as_json(), allow_nan=False)) == fresh.as_json()


def test_a_comparison_shows_itself_and_its_best(tmp_path: Path) -> None:
    heard = Heard()
    found = pf.compare(DATA, ["fedavg", "fedbn", "fedbn + no_norm"], callbacks=[heard], **SHORT)
    assert found.best() is max(found.rows[:2], key=lambda row: row.mean.value if row.mean else 0)
    assert set(found.problems) == {"fedbn + no_norm"} and "no batch norm" in found.rows[2].problem
    assert any("Skipping fedbn + no_norm" in text for text in heard.notices)
    shown = [line for line in repr(found).splitlines() if "no better than" not in line]
    assert shown[0] == f"{DATA}, seen, 1 round" and shown[1].split()[:2] == ["accuracy,", "%"]
    assert [line.split("  ")[0] for line in shown[2:5]] == ["fedavg", "fedbn", "fedbn + no_norm"]
    assert found._repr_html_().count("<tr>") == 5 and "could not be run" in found._repr_html_()
    assert [cost.method for cost in found.costs] == ["fedavg", "fedbn"]
    hopeless = pf.compare(DATA, "fedbn + no_norm", **SHORT)
    with pytest.raises(PolyfedError, match="No method could be run"):
        hopeless.best()


def test_compare_leaves_one_out_as_the_command_does(polyfed: Command, digits: DataSet) -> None:
    two = replace(digits, domains=digits.domains[:3])
    found = pf.compare(two, "fedavg", protocol="leave-one-out", **SHORT)
    (row,) = found.rows
    assert set(row.unseen) == {domain.name for domain in two.domains} and not row.seen
    name = two.domains[0].name
    alone = pf.run(two, "fedavg", unseen=name, unseen_part="all", **SHORT)
    assert row.unseen[name].value == alone.accuracy["unseen"][name]
    assert found.test_sizes[name] == alone.experiment.federation.test_sizes()["unseen"][name]
    federation = build_federation(digits, Settings())
    with pytest.raises(SettingError, match="which a federation does not allow"):
        pf.compare(federation, "fedavg", protocol="leave-one-out", **SHORT)
    with pytest.raises(SettingError, match="sets the unseen domains"):
        pf.compare(digits, "fedavg", protocol="leave-one-out", unseen=name, **SHORT)


def test_compare_takes_data_given_in_python_and_finds_its_runs_again(tmp_path: Path, digits: DataSet) -> None:
    named = pf.compare(DATA, "fedavg", **SHORT)
    for data in (digits, build_federation(digits, Settings())):
        out = tmp_path / type(data).__name__
        first = pf.compare(data, "fedavg", out=out, **SHORT)
        assert first.rows[0].seen == named.rows[0].seen
        assert RunFolder(first.rows[0].runs[0]).document()["given_in_python"] == ["data"]
        again = pf.compare(data, "fedavg", out=out, **SHORT)
        assert again.reused == 1 and again.rows == first.rows
    other = replace(digits, domains=digits.domains[1:])
    assert pf.compare(other, "fedavg", out=tmp_path / "DataSet", **SHORT).reused == 0
    with pytest.raises(SettingError, match="has no effect"):
        pf.compare(build_federation(digits, Settings()), "fedavg", unseen=digits.domains[0].name, **SHORT)


def test_methods_and_models_of_ones_own_are_trained_again(tmp_path: Path) -> None:
    mine, net = pf.Method("mine"), TinyNet()
    assert not is_registered(mine) and is_registered(pf.parse("fedbn"))
    settings: dict[str, Any] = {"rounds": 1, "batch_size": 8, "out": tmp_path / "runs"}
    first = pf.compare(tiny_federation(), [mine, "fedavg"], net, **settings)
    assert [row.method for row in first.rows] == ["mine", "fedavg"] and first.rows[0].seen == first.rows[1].seen
    again = pf.compare(tiny_federation(), [mine, "fedavg"], net, **settings)
    assert again.reused == 0 and again.rows[0].runs != first.rows[0].runs and again.rows[0].seen == first.rows[0].seen
    with pytest.raises(SettingError, match="Two different methods are named"):
        pf.compare(tiny_federation(), [mine, pf.Method("mine", facts=pf.Facts(client_state=True))], net, **settings)


def test_what_cannot_be_compared_gets_one_sentence() -> None:
    for more, words in (
        ({"methods": "fedavg", "seeds": 0}, "seeds must be at least 1"),
        ({"methods": "fedavg", "protocol": "loo"}, "leave-one-out"),
        ({"methods": []}, "No methods"),
        ({"methods": "fedavg", "method": "fedbn"}, "instead of method="),
        ({"methods": "fedavg", "lrr": 1.0}, "Did you mean lr"),
    ):
        with pytest.raises(PolyfedError, match=words):
            pf.compare(DATA, **more)  # type: ignore[arg-type]


def test_sweep_is_the_command(polyfed: Command, digits: DataSet) -> None:
    printed = polyfed("sweep", DATA, "--methods", "fedavg; fedprox", "--lr", "0.001,0.05", *OPTIONS, "-q", "--json").json
    heard = Heard()
    search = {"lr": [0.001, 0.05]}
    found = pf.sweep(DATA, ["fedavg", "fedprox"], search, callbacks=[heard], **SHORT)
    assert found.as_json() == printed and heard.rounds == 0  # read back from the command's folder
    assert len(heard.begun) == 2 * 2 + 2 and str(found.folder) == printed["out"] == "runs/sweep-digits-mini"
    fresh = pf.sweep(digits, "fedavg; fedprox", search, out="mine", **SHORT)
    written, commands = (json.loads((Path(folder) / "sweep.json").read_text()) for folder in ("mine", printed["out"]))
    for one, other in zip(written["methods"], commands["methods"], strict=True):
        assert [trial["validation"] for trial in one["trials"]] == [trial["validation"] for trial in other["trials"]]
        assert one["chosen"]["values"] == other["chosen"]["values"]
        assert [test["digest"] for test in one["tests"]] == [test["digest"] for test in other["tests"]]
    assert [row.seen for row in fresh.rows()] == [row.seen for row in found.rows()]
    assert repr(fresh).splitlines()[1].startswith("fedavg: lr=")


def test_what_cannot_be_searched_gets_one_sentence(digits: DataSet) -> None:
    for data, methods, search, more, words in (
        (build_federation(digits, Settings()), "fedavg", {"lr": [0.1]}, {}, "which a federation does not allow"),
        (digits, [pf.Method("mine")], {"lr": [0.1]}, {}, "methods must be expressions"),
        (digits, "fedavg", {"lr": [0.1]}, {"model": TinyNet()}, "the model must be a name"),
        (digits, "fedavg", {"lr": 0.1}, {}, "lr to a list of values"),
        (digits, "fedavg", {}, {}, "Nothing to search"),
        (digits, "fedavg", {"lr": [0.1]}, {"seeds": 0}, "seeds must be at least 1"),
    ):
        with pytest.raises(SettingError, match=words):
            pf.sweep(data, methods, search, out="nowhere", **more)  # type: ignore[arg-type]
    assert not Path("nowhere").exists()


def test_resume_open_run_and_report_are_the_commands(polyfed: Command) -> None:
    trained = pf.run(DATA, "fedbn", out="runs/one", **SHORT)
    assert pf.resume("runs/one").digest == pf.open_run("runs/one").digest == trained.digest
    assert polyfed("resume", "runs/one", "-q", "--json").json["digest"] == trained.digest
    assert polyfed("report", "runs", "-o", "page.html").code == 0
    written = Path("page.html").read_text()
    for runs in ("runs", ["runs/one"], Path("runs")):
        assert pf.report(runs, "page.html") == Path("page.html")
        assert Path("page.html").read_text() == written
    with pytest.raises(PolyfedError, match="is not a run folder and does not contain any"):
        pf.report("nowhere", "page.html")


def test_every_door_is_public_and_documented() -> None:
    for name in ("run", "compare", "sweep", "estimate", "resume", "open_run", "report"):
        door = getattr(pf, name)
        assert name in pf.__all__ and door.__module__.startswith("polyfed.api")
        assert all(f"\n    {part}:" in door.__doc__ for part in ("Args", "Returns", "Example"))
