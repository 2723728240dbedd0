"""A run over real Flower processes, used where neither the nodes nor their data are; ``tests/flower/test_reopen.py`` has more, in one process."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="needs the flower extra: pip install 'polyfed[flower]'")
pytest.importorskip("cryptography", reason="needs the flower extra: pip install 'polyfed[flower]'")

from PIL import Image

from helpers.command_line import as_process
from helpers.flower_harness import PROGRAMS, Trial, executor_name
from helpers.flower_runs import EXECUTOR, NODES, RUN_LIMIT, SMALL, SUPERNODE, Site, digest_in
from helpers.paths import DOCS
from helpers.trial_certificates import node_name
from polyfed import open_run
from polyfed.flower.app import write_app
from polyfed.runs.experiment import Experiment
from polyfed.runs.folder.manifest import NEWCOMER_FILE
from polyfed.runs.folder.run_folder import RunFolder
from polyfed.runs.lifecycle import train_run
from polyfed.settings import Settings

pytestmark = [pytest.mark.flower, pytest.mark.slow]

DATA = SMALL.data
SHORT = dataclasses.replace(SMALL, load=(), rounds=1)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("flower")
    configs = [f'data="{DATA}" domain="{name}" state="{folder / "state" / name}"' for name in NODES]
    with Trial(folder, configs, executor=EXECUTOR, supernode=SUPERNODE) as trial:
        yield Site(trial, folder)


def both(site: Site, settings: Settings, config: str, name: str) -> tuple[str, Path, Path]:
    """A run over the nodes and the same in process: the log of the first, and the folders of both."""
    out, alike = site.folder / name, site.folder / f"{name}-in-process"
    ended = site.run(settings, config, out)
    assert ended.status == "finished:completed", ended.log
    expected = train_run(Experiment(settings), RunFolder(alike))
    assert digest_in(ended.log) == expected.digest
    return ended.log, out, alike


@pytest.mark.parametrize("method", ["local", "copa", "hfedf", "pfedhn"])
def test_every_method_can_be_used_after_deployment(site: Site, tmp_path: Path, method: str) -> None:
    _, out, alike = both(site, dataclasses.replace(SHORT, method=method), "newcomer-model=true", method)
    assert (out / NEWCOMER_FILE).exists()
    Image.effect_noise((16, 16), 60).convert("RGB").save(tmp_path / "image.png")
    told = []
    for run in (out.rename(tmp_path / "taken"), alike):
        ended = as_process(tmp_path, "predict", run, tmp_path / "image.png", "--json", "-q")
        assert ended.code == 0, ended.err
        told.append(json.loads(ended.out)["predictions"])
    assert told[0] == told[1] and len(told[0]) == 1


def test_unseen_domains_are_tested_and_evaluate_says_what_it_needs(site: Site) -> None:
    settings, data = dataclasses.replace(SHORT, method="fedbn"), f'unseen-data="{DATA}"'
    _, out, alike = both(site, settings, f"{data} newcomer-model=true", "unseen")
    found, expected = open_run(out), open_run(alike)
    assert found.rows == expected.rows
    assert {row.domain for row in found.rows if row.view == "unseen"} == {"post", "print"}
    refused = site.run(settings, data)
    assert refused.status == "finished:failed"
    assert "the layers that fedbn keeps at the nodes. Request them (--run-config 'newcomer-model=true')" in refused.log
    log, _, _ = both(site, dataclasses.replace(settings, seed=1), "", "untested")
    assert "Unseen domains (post, print) are not tested" in log
    without_data = as_process(site.folder, "evaluate", out, "-q")
    assert without_data.code == 2 and "trained by Flower nodes" in " ".join(without_data.err.split())
    evaluated = as_process(site.folder, "evaluate", out, DATA, "--json", "-q")
    assert evaluated.code == 0 and set(json.loads(evaluated.out)["accuracy"]["unseen"]) >= {*NODES}, evaluated.err


def test_the_run_folder_is_named_after_the_nodes_data(site: Site) -> None:
    app = site.folder / "app-nameless"
    write_app(app, dataclasses.replace(SHORT, data="pacs", unseen=()), "nameless")
    ended = site.trial.run(app, "--run-config", f"min-nodes={len(NODES)}")
    assert ended.status == "finished:completed", ended.log
    (named,) = [line.split("run folder ")[1].strip() for line in ended.log.splitlines() if "run folder " in line]
    assert Path(named).parts[-2:] == ("runs", "digits-mini-fedavg-seed0") and (Path(named) / "run.toml").exists()


def test_telling_flwr_twice_where_the_server_is_lets_it_reach_the_server(site: Site, tmp_path: Path) -> None:
    (tmp_path / "certificates").symlink_to(site.trial.certificates)
    text = (DOCS / "own-superlink.md").read_text()
    begin = text.index("mkdir -p ~/.flwr")
    block = text[begin : text.index("\nEND\n", begin) + len("\nEND\n")].replace("127.0.0.1:8000", site.trial.address)
    variables = {**site.trial.variables(tmp_path), "HOME": str(tmp_path)}
    del variables["FLWR_HOME"]
    for _ in range(2):
        subprocess.run(["bash", "-euc", block], check=True, cwd=tmp_path, env=variables)
    assert (tmp_path / ".flwr/config.toml").read_text().count("[superlink.trial]") == 1
    done = subprocess.run(
        [str(PROGRAMS / "flwr"), "list", "trial"], env=variables, capture_output=True, text=True, timeout=RUN_LIMIT, check=False
    )
    assert done.returncode == 0, done.stderr


def test_nodes_have_as_long_to_describe_themselves_as_the_run_says(site: Site) -> None:
    for number in range(1, len(NODES) + 1):
        os.killpg(site.trial.processes[executor_name(node_name(number))].handle.pid, signal.SIGSTOP)
    ended = site.run(SHORT, "describe-timeout=2.0")
    assert ended.status == "finished:failed"
    assert ended.log.count("it did not reply within 2 seconds") >= len(NODES), ended.log
