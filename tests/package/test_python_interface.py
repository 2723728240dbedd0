"""What Python users hold in their hands: comparisons as frames and pictures, predictions, callbacks, short texts."""

from __future__ import annotations

import functools
import math
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import polyfed
from polyfed.errors import DataError, PolyfedError, SettingError
from polyfed.runs.assemble import build_data_set, build_federation
from polyfed.runs.callbacks.callback import RunState
from polyfed.settings import Settings

DATA = "digits-mini(per_domain=16)"
QUICK = {"rounds": 1, "batch_size": 16}


@pytest.fixture(scope="module")
def found() -> polyfed.Comparison:
    return polyfed.compare(DATA, ["fedavg", "fedbn"], unseen="street", **QUICK)


@pytest.fixture(scope="module")
def result() -> polyfed.Result:
    return polyfed.run(DATA, "fedbn", unseen="street", **QUICK)


def test_dir_lists_public_names_only() -> None:
    assert dir(polyfed) == sorted(polyfed.__all__)
    assert "Callback" in dir(polyfed) and "importlib" not in dir(polyfed) and "TYPE_CHECKING" not in dir(polyfed)


def test_a_comparison_as_frames(found: polyfed.Comparison) -> None:
    table = found.table()
    assert list(table.index) == ["fedavg", "fedbn"] and list(table.columns)[-1] == "unseen: street"
    for row in found.rows:
        assert row.mean is not None and table.loc[row.method, "mean"] == row.mean.value
    metrics = found.metrics()
    assert len(metrics) == 2 * 5 and {"method", "seed", "view", "domain", "accuracy", "macro_f1", "majority_rate"} <= set(metrics)
    seen = metrics[(metrics.method == "fedbn") & (metrics.view == "seen")]
    assert seen.accuracy.mean() == pytest.approx(table.loc["fedbn", "mean"])
    assert found.table("balanced_accuracy").columns.name == "balanced_accuracy"
    with pytest.raises(SettingError, match="Unknown metric 'f1'"):
        found.table("f1")


def test_without_pandas_a_sentence(found: polyfed.Comparison, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(PolyfedError, match=re.escape("pip install 'polyfed[pandas]'")):
        found.table()


def test_pictures_and_texts(found: polyfed.Comparison, result: polyfed.Result) -> None:
    assert len(found.plot().axes[0].get_xticks()) == 7
    assert "data:image/png;base64," in found._repr_html_() and "most frequent class" in repr(found)
    assert len(result.plot().axes) == 1 and len(result.classes) == 10
    assert found.significance.count("McNemar") == len(found.verdicts) == 2 and found.as_json()["significance"] == found.significance


def test_predictions_have_the_names_of_the_classes(result: polyfed.Result, tmp_path: Path) -> None:
    from PIL import Image

    data = build_data_set(DATA, Settings())
    x, _ = data.domains[0].test.batch(slice(0, 3))
    answers = result.predict(x)
    assert len(answers) == 3 and all(answer.label in result.classes for answer in answers)
    assert all(sum(answer.probabilities.values()) == pytest.approx(1, abs=1e-5) for answer in answers)
    last = np.ascontiguousarray(x.permute(0, 2, 3, 1).numpy())
    files = [tmp_path / f"{place}.png" for place in range(3)]
    for file, array in zip(files, last, strict=True):
        Image.fromarray(array).save(file)
    for other in (last, [Image.fromarray(array) for array in last], files):
        assert [answer.label for answer in result.predict(other)] == [answer.label for answer in answers]
    own = result.predict(x, client="pen")
    with torch.no_grad():
        expected = result.model_for("pen")(result.experiment.bench.preparation.for_testing(x)).softmax(1)
    assert [answer.probability for answer in own] == pytest.approx(expected.max(1).values.tolist(), abs=1e-5)
    for wrong, words in (
        (torch.zeros(2, 3, 8, 8), "uint8"),
        ([], "no images"),
        ([3], "Cannot use int"),
        ("nowhere.png", "Cannot read"),
    ):
        with pytest.raises(DataError, match=words):
            result.predict(wrong)
    with pytest.raises(DataError, match="Unknown client 'pan'"):
        result.predict(x, client="pan")


def test_a_federation_prints_as_a_short_table() -> None:
    federation = build_federation(DATA, Settings(unseen=("street",)))
    lines = repr(federation).splitlines()
    assert lines[0] == "<Federation digits-mini: 4 clients, 10 classes>" and "tensor" not in repr(federation)
    assert lines[1].split() == ["client", "domain", "train", "validation", "test"] and lines[-1].startswith("unseen: street (")
    assert len(lines) == 7
    assert repr(build_data_set(DATA, Settings())).startswith("<DataSet digits-mini: 5 domains, 10 classes>")


class Notes(polyfed.Callback):
    def __init__(self, stop_after: int | None = None) -> None:
        self.said: list[str] = []
        self.stop_after = stop_after

    def begin(self, run: RunState) -> None:
        self.said.append(f"begin {run.method} {run.round}/{run.rounds}")

    def after_round(self, run: RunState) -> bool:
        assert run.losses and run.bytes_up > 0
        self.said.append(f"round {run.round}")
        return run.round == self.stop_after

    def after_evaluation(self, run: RunState) -> None:
        self.said.append(f"scored {run.round} {len(run.scores)}")

    def end(self, result: polyfed.Result) -> None:
        self.said.append(f"end {len(result.rows)}")


def test_a_callback_hears_of_a_run_and_changes_nothing() -> None:
    notes = Notes()
    heard = polyfed.run(DATA, "fedbn", callbacks=[notes], evaluate_every=2, **{**QUICK, "rounds": 2})
    assert notes.said == ["begin fedbn 0/2", "round 1", "round 2", "scored 2 5", "end 5"]
    assert heard.digest == polyfed.run(DATA, "fedbn", **{**QUICK, "rounds": 2}).digest


def test_a_callback_may_stop_a_run(tmp_path: Path) -> None:
    notes = Notes(stop_after=1)
    stopped = polyfed.run(DATA, "fedbn", callbacks=[notes], out=tmp_path / "run", **{**QUICK, "rounds": 9})
    assert notes.said == ["begin fedbn 0/9", "round 1", "end 5"] and stopped.summary()["rounds"] == 1
    assert "confusion" in stopped.rows[0].numbers
    again = polyfed.resume(tmp_path / "run")
    assert again.summary()["rounds"] == 1 and again.digest == stopped.digest and again.accuracy == stopped.accuracy


class Interrupted(polyfed.Callback):
    def after_round(self, run: RunState) -> bool:
        raise KeyboardInterrupt


class StopsWhereItGoesOn(polyfed.Callback):
    def begin(self, run: RunState) -> bool:
        return True


def test_a_callback_may_stop_a_run_that_goes_on(tmp_path: Path) -> None:
    """A decision that was due when the run was interrupted is not lost."""
    with pytest.raises(KeyboardInterrupt):
        polyfed.run(DATA, "fedbn", callbacks=[Interrupted()], out=tmp_path / "run", checkpoint_every="1", **{**QUICK, "rounds": 3})
    assert polyfed.resume(tmp_path / "run", callbacks=[StopsWhereItGoesOn()]).summary()["rounds"] == 1
    never_begun = polyfed.run(DATA, "fedbn", callbacks=[StopsWhereItGoesOn()], **{**QUICK, "rounds": 2})
    assert never_begun.summary()["rounds"] == 2


def small_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(logits, labels)


def test_a_scheduler_of_torch_takes_a_step_after_each_round(tmp_path: Path) -> None:
    halved = functools.partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.5)
    rounds = {**QUICK, "rounds": 3}
    given = polyfed.run(DATA, schedule=halved, out=tmp_path / "run", **rounds)
    assert given.digest == polyfed.run(DATA, schedule=lambda number, _: 0.5 ** (number - 1), **rounds).digest
    assert 'schedule = "torch.optim.lr_scheduler:ExponentialLR(gamma=0.5)"' in (tmp_path / "run" / "run.toml").read_text()
    for wrong, said in (
        (torch.optim.lr_scheduler.CosineAnnealingLR, "T_max"),
        (torch.optim.lr_scheduler.ReduceLROnPlateau, "metrics"),
        (torch.nn.Linear, "a torch scheduler, got the class Linear"),
    ):
        with pytest.raises(SettingError, match=said):
            polyfed.run(DATA, schedule=wrong, **QUICK)


def test_objects_in_the_place_of_names(tmp_path: Path) -> None:
    named = polyfed.run(DATA, "fedbn", schedule="cosine", **{**QUICK, "rounds": 2})
    given = polyfed.run(
        DATA,
        "fedbn",
        optimizer=torch.optim.SGD,
        loss=small_loss,
        schedule=lambda number, rounds: 0.5 * (1 + math.cos(math.pi * (number - 1) / rounds)),
        out=tmp_path / "run",
        **{**QUICK, "rounds": 2},
    )
    assert given.digest == named.digest, "the same arithmetic, given as objects"
    text = (tmp_path / "run" / "run.toml").read_text()
    assert 'loss = "test_python_interface:small_loss"' in text or ":small_loss" in text
    assert 'optimizer = "torch.optim.sgd:SGD"' in text
    with pytest.raises(PolyfedError, match="optimizer and loss and schedule given in Python"):
        polyfed.resume(tmp_path / "run")
    other = polyfed.run(DATA, "fedbn", optimizer=torch.optim.RMSprop, loss=torch.nn.CrossEntropyLoss(label_smoothing=0.3), **QUICK)
    assert other.digest != polyfed.run(DATA, "fedbn", **QUICK).digest
    flipped = polyfed.run(DATA, augment=lambda x: x.flip(-1), **QUICK)
    assert flipped.digest != polyfed.run(DATA, **QUICK).digest
    for wrong, words in (({"loss": 3}, "loss must be a name or a callable"), ({"schedule": lambda: 1.0}, "must take the round")):
        with pytest.raises(SettingError, match=words):
            polyfed.run(DATA, **QUICK, **wrong)
    with pytest.raises(SettingError, match="cannot be used with workers='2'"):
        polyfed.run(DATA, loss=small_loss, workers="2", **QUICK)
