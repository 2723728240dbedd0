"""A run on Flower's simulation runtime: stopped after a round, resumed, looked at, and compared with the run in process."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

from helpers.flower_runs import NODES, SMALL, in_process
from helpers.watching import AfterRound
from polyfed.runs.callbacks.callback import RunState
from polyfed.runs.experiment import Experiment
from polyfed.runs.folder.run_folder import RunFolder
from polyfed.runs.lifecycle import resume, train_run
from polyfed.runs.reopen import open_experiment


def stop(run: RunState) -> None:
    if run.round == 1:
        raise KeyboardInterrupt


def main(out: Path) -> None:
    settings = dataclasses.replace(SMALL, method="fedbn", backend="flower")
    expected = in_process(dataclasses.replace(settings, backend="process"))
    try:
        train_run(Experiment(settings), RunFolder(out), callbacks=[AfterRound(stop)])
        raise AssertionError("the run was not stopped")
    except KeyboardInterrupt:
        print("stopped after round 1")
    found = resume(out)
    assert found.digest == expected.digest
    assert found.rows == expected.rows
    assert open_experiment(out, own_data=True).evaluate(in_detail=True) == expected.rows
    models = [result.model_for(NODES[0]).state_dict() for result in (found, expected)]
    assert all(bool((models[0][name] == models[1][name]).all()) for name in models[1])
    print("all as in process")


if __name__ == "__main__":
    main(Path(sys.argv[1]) / "run")
