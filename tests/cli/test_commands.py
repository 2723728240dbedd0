"""The command line: output, exit codes, and error messages."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from helpers.command_line import SHORT, STOPPER, Command, picture, says
from helpers.paths import SOURCE
from polyfed.cli.main import app


def test_module_runs_as_a_command() -> None:
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    ended = subprocess.run([sys.executable, "-m", "polyfed", "run"], capture_output=True, text=True, env=environment, check=False)
    assert ended.returncode == 2
    assert ended.stderr.startswith("polyfed: DATA is missing.")


def test_run_prints_tables_and_json(polyfed: Command, images: Path) -> None:
    ended = polyfed("run", images, "--method", "fedbn", *SHORT, "--unseen", "night", "--json")
    assert ended.code == 0, ended.err
    result = ended.json
    accuracy = result["accuracy"]
    assert set(accuracy["seen"]) == {"day"} and set(accuracy["unseen"]) == {"night"}
    assert accuracy["mean"] == accuracy["worst"] == accuracy["seen"]["day"]
    assert all(0 <= value <= 1 for value in (*accuracy["seen"].values(), *accuracy["unseen"].values()))
    assert result["run"] == "runs/pictures-fedbn-seed0" and Path(result["run"], "run.toml").is_file()
    # Computed from the layers of small_cnn for two classes: three convolutions without bias, and the head.
    shared = 4 * (16 * 3 * 25 + 32 * 16 * 9 + 64 * 32 * 9 + 64 * 16 * 2 + 2)
    assert result["bytes_up"] == result["bytes_down"] == 2 * shared
    assert result["seconds"] > 0
    night = next(score for score in result["scores"] if score["domain"] == "night")
    p, n = accuracy["unseen"]["night"], night["count"]
    assert f"{100 * p:.1f} ±{100 * math.sqrt(p * (1 - p) / n):.1f}" in ended.out
    assert "unseen" in ended.out and "traffic" in ended.out and "run folder: runs/pictures-fedbn-seed0" in ended.out


def test_quiet_prints_only_json_and_numbers_the_folder(polyfed: Command, images: Path) -> None:
    first = polyfed("run", images, *SHORT, "--quiet", "--json")
    second = polyfed("run", images, *SHORT, "--quiet", "--json", "--set", "rounds=1", "--set", "clients-per-round=1")
    assert len(first.out.splitlines()) == 1 and first.err == ""
    assert first.json["run"] == "runs/pictures-fedavg-seed0" and second.json["run"] == "runs/pictures-fedavg-seed0-2"
    assert (first.json["rounds"], second.json["rounds"]) == (2, 1)
    assert polyfed("run", images, *SHORT, "--quiet").out == ""


def test_notices_are_warnings(polyfed: Command, images: Path) -> None:
    ended = polyfed("run", images, "--method", "fedbn", *SHORT, "--clients-per-round", "1", "--json")
    assert ended.code == 0
    assert "polyfed: warning: fedbn keeps state at clients" in ended.err
    assert "keeps state" in ended.json["notices"][0]


def test_digest_is_that_of_the_run_and_the_same_for_equal_runs(polyfed: Command, images: Path) -> None:
    runs = {"a": "fedavg", "b": "fedavg", "c": "fedprox(mu=0.0)", "d": "fedprox(mu=0.5)"}
    result = {
        out: polyfed("run", images, "--method", text, *SHORT, "--out", out, "-q", "--json").json for out, text in runs.items()
    }
    printed = {out: polyfed("digest", out).out.strip() for out in runs}
    assert printed == {out: summary["digest"] for out, summary in result.items()}
    assert printed["a"] == printed["b"] == printed["c"] != printed["d"]
    assert polyfed("digest", "a", "--json").json == {"digest": printed["a"], "round": 2, "finished": True, "run": "a"}


def test_recipe_is_overridden_by_options(polyfed: Command, images: Path, tmp_path: Path) -> None:
    polyfed("run", images, "--method", "fedbn", *SHORT, "--out", "first", "-q")
    again = polyfed("run", "--recipe", "first/run.toml", "--rounds", "1", "-q", "--json").json
    assert (again["method"], again["rounds"], again["data"]) == ("fedbn", 1, str(images))
    (tmp_path / "wrong.toml").write_text("[settings]\nronds = 3\n")
    says(polyfed("run", images, "--recipe", "wrong.toml"), "ronds", "rounds")
    says(polyfed("run", images, "--recipe", "nowhere.toml"), "nowhere.toml does not exist")


@pytest.mark.parametrize("method", ["fedbn", "fedavg"])
def test_stopped_run_is_resumed_to_the_same_end(polyfed: Command, images: Path, tmp_path: Path, method: str) -> None:
    (tmp_path / "stopping.py").write_text(STOPPER)
    command = ("run", images, "--method", f"{method} + stopper", "--load", "stopping.py", *SHORT, "--rounds", "3", "-q", "--json")
    (tmp_path / "stop").touch()
    stopped = polyfed(*command, "--out", "stopped")
    assert (stopped.code, stopped.out) == (130, "")
    assert stopped.err == "polyfed: Stopped. Resume it with: polyfed resume stopped\n"
    (tmp_path / "stop").unlink()
    whole = polyfed(*command, "--out", "whole").json
    resumed = polyfed("resume", "stopped", "--json", "-q").json
    for key in ("digest", "accuracy", "rounds", "bytes_up"):
        assert resumed[key] == whole[key], key
    assert polyfed("resume", "stopped", "--json", "-q").json["digest"] == whole["digest"]


def test_evaluate_own_and_other_data(polyfed: Command, images: Path, tmp_path: Path) -> None:
    trained = polyfed("run", images, "--method", "fedbn", *SHORT, "--unseen", "night", "--out", "r", "-q", "--json").json
    own = polyfed("evaluate", "r", "--newcomer", "all", "--json")
    assert own.json["accuracy"] == trained["accuracy"]
    assert set(own.json["newcomer"]) == {"averaged", "re-estimated", "nearest", "ensemble"}
    assert own.json["newcomer"]["averaged"] == trained["accuracy"]["unseen"]
    assert "re-estimated" in own.out and "ensemble" in own.out
    other = tmp_path / "other"
    (images / "night").rename(tmp_path / "dusk")
    other.mkdir()
    (tmp_path / "dusk").rename(other / "dusk")
    # The run's own data are incomplete now, so put one domain back under its old name.
    (images / "night").symlink_to(other / "dusk")
    found = polyfed("evaluate", "r", other, "--part", "all", "--json", "-q").json
    assert found["accuracy"]["seen"] == {} and set(found["accuracy"]["unseen"]) == {"dusk"}
    assert found["scores"][0]["count"] == 40
    says(polyfed("evaluate", "r", "--newcomer", "averagd", "-q"), "averaged")
    says(polyfed("evaluate", "nowhere", "-q"), "nowhere is not a run")
    says(polyfed("evaluate", "r", other, "--root", "files", "-q"), "--root has no effect")
    assert polyfed("evaluate", "r", "--split", "validation", "--json", "-q").json["scores"][0]["count"] == 4


def test_unreadable_images_are_left_out_only_on_request(polyfed: Command, images: Path) -> None:
    (images / "day" / "disk" / "broken.png").write_bytes(b"\x89PNG nothing")
    refused = polyfed("run", images, *SHORT, "-q")
    assert refused.code == 2 and "broken.png" in refused.err and "skip_unreadable=True" in refused.err
    allowed = polyfed("run", f'image_folder(root="{images}", size=16, skip_unreadable=True)', *SHORT, "--out", "r", "-q")
    assert allowed.code == 0 and "1 unreadable image skipped" in Path("r/run.toml").read_text()


def test_predict_names_unreadable_images_and_goes_on(polyfed: Command, images: Path, tmp_path: Path) -> None:
    polyfed("run", images, "--method", "fedbn", *SHORT, "--rounds", "6", "--out", "r", "-q")
    picture("stripe", False, np.random.default_rng(9)).resize((50, 30)).save(tmp_path / "new.png")
    (tmp_path / "broken.png").write_bytes(b"\x89PNG nothing")
    whole = polyfed("predict", "r", "new.png", "--client", "day", "--json")
    assert whole.code == 0 and "new.png" in whole.out
    answer = whole.json["predictions"][0]
    assert answer["class"] == "stripe" and answer["probability"] == pytest.approx(max(answer["probabilities"].values()), abs=1e-5)
    assert sum(answer["probabilities"].values()) == pytest.approx(1, abs=1e-4)
    partly = polyfed("predict", "r", "broken.png", "new.png", "missing.png", "--json")
    assert partly.code == 2
    assert [row["image"] for row in partly.json["predictions"]] == ["new.png"]
    assert "broken.png cannot be read" in partly.err and "Cannot read missing.png" in partly.err
    says(polyfed("predict", "r", "new.png", "--client", "dya"), "Clients: day, night.")


def test_predict_takes_the_runs_own_newcomer_and_refuses_an_empty_folder(polyfed: Command, images: Path, tmp_path: Path) -> None:
    assert polyfed("run", images, *SHORT, "--unseen", "night", "--newcomer", "ensemble", "--out", "r").code == 0
    Image.new("RGB", (16, 16), (250, 250, 250)).save(tmp_path / "new.png")
    assert "newcomer, ensemble" in polyfed("predict", "r", "new.png").out
    says(polyfed("predict", "r", "new.png", "--client", "day", "--newcomer", "nearest"), "--newcomer nearest has no effect")
    (tmp_path / "empty").mkdir()
    says(polyfed("predict", "r", "empty"), "No images found in empty")


def test_newcomer_is_rejected_for_a_method_with_a_custom_newcomer(polyfed: Command, images: Path, tmp_path: Path) -> None:
    polyfed("run", images, "--method", "local", *SHORT, "--unseen", "night", "--out", "r", "-q")
    Image.new("RGB", (16, 16), (250, 250, 250)).save(tmp_path / "new.png")
    assert "local, newcomer\n" in polyfed("predict", "r", "new.png").out
    says(polyfed("predict", "r", "new.png", "--newcomer", "nearest"), "local defines its own newcomer model")
    evaluated = polyfed("evaluate", "r", "--newcomer", "nearest")
    assert "--newcomer nearest has no effect" in evaluated.err and "(newcomer:" not in evaluated.out


def test_messages_about_missing_options(polyfed: Command, tmp_path: Path, images: Path) -> None:
    says(polyfed("run", "pacs"), "pacs reads files", "--root DIR")
    says(polyfed("run", images, "--partition", "dirichlet"), "dirichlet requires", "=...")
    says(polyfed("run", images, "--optimizer", "adam", "--momentum", "0.9"), "--momentum works only with --optimizer sgd")
    (tmp_path / "pacs").mkdir()
    says(polyfed("run", "pacs"), "pacs reads files")


def test_lists_and_descriptions(polyfed: Command) -> None:
    methods = {item["name"]: item for item in polyfed("ls", "methods", "--json").json["items"]}
    assert methods["fedbn"]["needs_batch_norm"] and methods["fedbn"]["keeps_client_state"]
    assert not methods["fedavg"]["needs_batch_norm"] and methods["fedavg"]["sampled_clients"] == "yes"
    assert "digits-mini" in polyfed("ls", "data").out and "small_cnn" in polyfed("ls", "models").out
    assert "dirichlet" in polyfed("ls", "partitions").out and "cross_entropy" in polyfed("ls", "losses").out
    says(polyfed("ls", "metods"), "Did you mean methods?")
    says(polyfed("show", "fedbm"), "Did you mean fedbn?")
    assert polyfed("show", "domain-even", "--json").json["options"][0]["default"] == 20
    printed = polyfed("show", "fedwon").out
    assert re.search(r"smallest batch +1\b", printed) and re.search(r"needs batch norm +no\b", printed)


def test_show_prints_the_sharing_plan(polyfed: Command, images: Path) -> None:
    result = polyfed("show", "agc + fedbn", "--data", images, "--json").json
    travels = {row["kind"]: row["travels"] for row in result["plan"]}
    assert result["name"] == "fedbn + agc(clip=1.28)"
    assert travels["norm_affine"] == travels["norm_stat"] == "local" and travels["weight"] == travels["head"] == "shared"
    printed = polyfed("show", "fedbn", "--data", images, "--model", "resnet20").out
    assert "Reference: X. Li et al." in printed and "norm_stat" in printed
    model = polyfed("show", "small_cnn", "--data", images, "--json").json
    assert model["parameters"] == 34714 - 8 * (1024 + 1)


def test_bad_input_gets_one_sentence(polyfed: Command, images: Path, tmp_path: Path) -> None:
    says(polyfed("run", images, "--method", "fedbm"), "fedbm", "Did you mean fedbn?")
    says(polyfed("run", images, "--method", "fedprox(nu=1)"), "nu", "Choose from: mu.")
    says(polyfed("run", images, "--rounds", "-1"), "rounds must be at least 1, got -1")
    says(polyfed("run", images, "--rounds", "many"), "--rounds")
    says(polyfed("run", images, "--ronds", "3"), "--rounds")
    says(polyfed("run", images, "--set", "ronds=3"), "Did you mean rounds?")
    says(polyfed("run", images, "--weights", "sample"), "Did you mean samples?")
    says(polyfed("run", "digits-minni"), "There is no data set called 'digits-minni'. Did you mean digits-mini?")
    says(polyfed("run", images, "--unseen", "nite"), "night")
    says(polyfed("run", images, "--method", "fedbn + group_norm"), "fedbn")
    says(polyfed("run", images, "--load", "nowhere.py"), "nowhere.py")
    says(polyfed("rnu"), "rnu")
    says(polyfed("run", images, "--out", str(images / "day" / "disk" / "00.png" / "x")), "Cannot write a run")
    assert not (tmp_path / "runs").exists()


def test_bad_folders_and_models_get_one_sentence(
    polyfed: Command, images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_models.py").write_text(
        "from torch import nn\ndef wrong():\n    return nn.Sequential(nn.Flatten(), nn.LazyLinear(7))\n"
        "def right(classes):\n    return nn.Sequential(nn.Flatten(), nn.LazyLinear(classes))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    says(polyfed("run", images, "--model", "own_models:wrong"), "Sequential returns (2, 7)", "expected (2, 2)")
    says(polyfed("run", images, "--model", "own_models:rihgt"), "own_models:rihgt")
    (images / "day" / "disk" / "03.png").write_bytes(b"not an image")
    says(polyfed("run", images), "03.png")


def test_loss_that_is_not_finite(polyfed: Command, images: Path) -> None:
    says(polyfed("run", images, *SHORT, "--lr", "1e30", "--out", "stop"), "client", "day", "round 1")
    dropped = polyfed("run", images, *SHORT, "--lr", "1e30", "--on-nan", "drop", "--retries", "0", "--out", "drop")
    assert dropped.code == 2
    assert "polyfed: warning: Round 1: client day is dropped" in dropped.err


def test_debug_shows_the_trace(polyfed: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    from polyfed.errors import SettingError

    with pytest.raises(SettingError):
        app(["--debug", "run", "x", "--rounds", "-1"], prog_name="polyfed")
    monkeypatch.setenv("POLYFED_DEBUG", "1")
    with pytest.raises(SettingError):
        app(["run", "x", "--rounds", "-1"], prog_name="polyfed")


def test_data_check(polyfed: Command, tmp_path: Path) -> None:
    says(polyfed("data", "check", "digits-mini", "--root", tmp_path), "no files to check")
    says(polyfed("data", "check", "digit-five", "--root", tmp_path), "Did you mean digits-five?")
    assert polyfed("data", "check", "pacs", "--root", tmp_path).code == 2
