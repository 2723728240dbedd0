"""Runs without a final state: models are refused or labelled with their round, and a run that diverged says where."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors import safe_open

import polyfed as package
from helpers.command_line import SHORT, Command, says
from helpers.recorded_runs import experiment_of, run_until
from helpers.report_page import words
from polyfed.errors import RunFolderError
from polyfed.runs.folder.run_folder import RunFolder
from polyfed.runs.lifecycle import train_run

EXPLODER = '''
from pathlib import Path
from polyfed import Method, register

def explode(step):
    """Give one client infinite weights in round 2."""
    if step.client.round == 2 and step.client.id == "night" and Path("explode").exists():
        for parameter in step.client.bench.model.parameters():
            if parameter.grad is not None:
                parameter.grad.fill_(float("inf"))

@register
def exploder() -> Method:
    """Explode."""
    return Method("exploder", gradients=(explode,), standalone=False)
'''
DIVERGED = "diverged in round 2 at client night"


def trained(polyfed: Command, images: Path, *more: str) -> None:
    assert polyfed("run", images, *SHORT, "--out", "r", "-q", *more).code == 0


def damage_final_state(run: str | Path) -> None:
    (file,) = (Path(run) / "checkpoint").glob("server-*_final.safetensors")
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def test_a_model_without_its_final_state_is_refused(polyfed: Command, images: Path) -> None:
    trained(polyfed, images)
    picture = next(images.rglob("*.png"))
    asked = ("predict", "r", picture, "--json", "-q")
    before = polyfed(*asked).json
    damage_final_state("r")
    export = ("export", "r", "--to", "safetensors", "-o", "m.safetensors", "-q")
    for command in (export, asked, ("evaluate", "r", "--json", "-q"), ("report", "r", "-o", "page.html")):
        says(polyfed(*command), "_final.safetensors is damaged", "round 0 of 2", "polyfed resume r", "--allow-unfinished")
    assert not Path("m.safetensors").exists() and not Path("page.html").exists()
    for refused in (
        lambda: package.open_run("r"),
        lambda: package.evaluate("r"),
        lambda: package.predict("r", str(picture)),
        lambda: package.export("r", "safetensors"),
        lambda: package.report("r", "page.html"),
    ):
        with pytest.raises(RunFolderError, match="allow_unfinished=True"):
            refused()
    assert polyfed("resume", "r", "-q").code == 0
    assert polyfed(*asked).json == before and "warning" not in before and before["round"] == 2


def test_an_unfinished_model_carries_its_round_and_a_warning(polyfed: Command, images: Path) -> None:
    trained(polyfed, images)
    damage_final_state("r")
    exported = polyfed("export", "r", "--to", "safetensors", "-o", "m.safetensors", "--allow-unfinished", "--json")
    with safe_open("m.safetensors", "pt") as file:
        metadata = file.metadata()
    assert metadata["round"] == "0" and "round 0 of 2" in metadata["warning"] and exported.json["metadata"] == metadata
    assert "as trained" not in exported.out and "round 0 of 2" in exported.out.splitlines()[0] + exported.out.splitlines()[1]
    predicted = polyfed("predict", "r", next(images.rglob("*.png")), "--allow-unfinished", "--json")
    assert predicted.json["round"] == 0 and "round 0 of 2" in predicted.json["warning"] and "round 0 of 2" in predicted.out
    scored = polyfed("evaluate", "r", "--allow-unfinished", "--json")
    assert scored.json["rounds"] == 0 and "round 0 of 2" in scored.json["warning"]
    assert "round 0 of 2" in "".join(scored.out.splitlines()[:-1])
    opened = package.open_run("r", allow_unfinished=True, notify=lambda _: None)
    assert opened.experiment.server.round == 0 and "round 0 of 2" in opened.summary()["warning"]


def test_a_running_comparison_is_labelled_and_its_tables_are_refused(polyfed: Command, tmp_path: Path) -> None:
    run_until(tmp_path / "runs" / "half", 3, "fedbn", evaluate_every=1)
    train_run(experiment_of("fedavg", lr=1e-6), RunFolder(tmp_path / "runs" / "done"))
    assert polyfed("report", "runs", "-o", "page.html").code == 0
    page = words(Path("page.html").read_text())
    assert "unfinished: round 3 of 4" in page
    for option in ("--tables", "latex"), ("--tables", "json"), ("--figures", "svg"):
        says(polyfed("report", "runs", *option, "-o", "out"), "half", "round 3 of 4", "--allow-unfinished")
    for form in ("latex", "md", "csv", "json"):
        assert polyfed("report", "runs", "--tables", form, "-o", "out", "--allow-unfinished").code == 0
    for suffix in ("tex", "md"):
        text = Path(f"out/tables.{suffix}").read_text()
        rows = [line for line in text.splitlines() if line.lstrip("| ").startswith("fed") and (" & " in line or line[0] == "|")]
        assert rows[0].lstrip("| ").startswith("fedavg") and "round 3 of 4" in text  # although fedavg scores lower
        assert not any("textbf" in line or "**" in line for line in text.splitlines() if "fedbn" in line)
    rows = json.loads(Path("out/tables.json").read_text())["scores"]
    assert {(row["method"], row["round"], row["state"]) for row in rows} == {
        ("fedavg", 4, "finished"),
        ("fedbn", 3, "unfinished: round 3 of 4"),
    }
    assert "unfinished" in Path("out/tables.csv").read_text()


def exploding(polyfed: Command, images: Path, command: str, *more: str) -> tuple[str, ...]:
    Path("exploder.py").write_text(EXPLODER)
    Path("explode").touch()
    return (command, str(images), "--load", "exploder.py", "--batch-size", "8", "--lr", "0.03", "--rounds", "3", *more)


def test_a_run_that_diverged_says_where_and_suggests_a_rate(polyfed: Command, images: Path) -> None:
    command = exploding(polyfed, images, "run", "--method", "fedavg + exploder", "--checkpoint-every", "1")
    says(polyfed(*command, "--out", "runs/a", "-q"), "iverged in round 2 at client night", "--lr 0.01")
    assert DIVERGED in " ".join(polyfed("watch", "runs", "--once").out.split())
    says(polyfed("predict", "runs/a", next(images.rglob("*.png")), "-q"), DIVERGED, "--lr 0.01", "--allow-unfinished")
    assert polyfed("report", "runs", "-o", "page.html").code == 0
    page = words(Path("page.html").read_text())
    assert DIVERGED in page and "--lr 0.01" in page and "polyfed resume" not in page
    assert polyfed("report", "runs", "--tables", "json", "-o", "out").code == 0
    (state,) = json.loads(Path("out/tables.json").read_text())["runs"]
    assert state["diverged"] == {"round": 2, "client": "night", "suggested_lr": 0.01} and state["round"] == 1
    # The same NaN again, and the same record.
    says(polyfed("resume", "runs/a", "-q"), "iverged in round 2 at client night")
    assert DIVERGED in " ".join(polyfed("watch", "runs", "--once").out.split())
    Path("explode").unlink()
    assert polyfed("resume", "runs/a", "-q").code == 0
    assert "diverged" not in polyfed("watch", "runs", "--once").out and "finished" in polyfed("watch", "runs", "--once").out


@pytest.mark.parametrize("options", [("--workers", "2"), ("--backend", "fused"), ("--backend", "debug")])
def test_every_backend_names_the_client_that_diverged(polyfed: Command, images: Path, options: tuple[str, ...]) -> None:
    ended = polyfed("run", images, "--lr", "1e30", "--rounds", "2", "--batch-size", "8", "--out", "r", "-q", *options)
    says(ended, "Diverged in round 1 at client day")
    assert "diverged in round 1 at client day" in " ".join(polyfed("watch", "r", "--once").out.split())


def test_a_comparison_shows_which_method_diverged(polyfed: Command, images: Path) -> None:
    command = exploding(polyfed, images, "compare", "--methods", "fedavg; fedbn + exploder", "--out", "c")
    ended = polyfed(*command, "--json", "--no-costs")
    shown = " ".join(ended.out.split())
    assert ended.code == 2 and "fedbn + exploder diverged in round 2 at client night" in shown and "could not be run" not in shown
    assert "--lr 0.01" in shown
    row = next(line for line in ended.out.splitlines() if "fedbn + exploder" in line)
    assert "diverged" in row
    first, second = ended.json["methods"]
    assert first["diverged"] is None
    assert second["diverged"] == {"round": 2, "client": "night", "suggested_lr": 0.01}


def test_weights_that_are_not_finite_at_every_client_are_a_divergence(polyfed: Command, images: Path) -> None:
    Path("exploder.py").write_text(EXPLODER.replace('and step.client.id == "night" ', ""))
    Path("explode").touch()
    more = ("--load", "exploder.py", "--method", "fedavg + exploder", "--local-steps", "1", "--lr", "0.03", "--rounds", "3")
    ended = polyfed("run", images, *more, "--batch-size", "8", "--out", "r", "-q")
    says(ended, "iverged in round 2 at all clients", "--lr 0.01")
    assert "diverged in round 2 at all clients" in " ".join(polyfed("watch", "r", "--once").out.split())


def test_losses_above_chance_are_said_after_round_1(polyfed: Command, images: Path) -> None:
    ended = polyfed("run", images, "--lr", "3", "--rounds", "1", "--batch-size", "8", "--out", "r")
    line = next(line for line in ended.err.splitlines() if "above the chance level" in line)
    # Two classes: the loss at chance is log 2.
    assert "fedavg" in line and "(0.693)" in line and "--lr 1" in line
    quiet = polyfed("run", images, "--lr", "0.01", "--rounds", "1", "--batch-size", "8", "--out", "r2")
    assert "above the chance level" not in quiet.err
