"""``polyfed watch``: what it shows of a run that is trained, finished, or stopped; it writes nothing."""

from __future__ import annotations

import json
from pathlib import Path

import polyfed as package
from helpers.command_line import Command
from polyfed.studies.report.live import look_at, spark

DATA = "digits-mini(per_domain=16)"


def test_watching_runs(tmp_path: Path, polyfed: Command) -> None:
    seen: list[str] = []

    class Look(package.Callback):
        def after_round(self, run: object) -> None:
            live = look_at(tmp_path / "runs" / "one")
            seen.append(f"{live.state} {live.round}/{live.rounds} {sorted({domain for _, domain in live.curves})}")

    package.run(DATA, "fedbn", rounds=2, evaluate_every=1, batch_size=16, out=tmp_path / "runs" / "one", callbacks=[Look()])
    domains = ["mean", "pen", "photo", "post", "print", "street"]
    assert seen == [f"training 1/2 {domains}", f"training 2/2 {domains}"]
    before = {path: path.read_bytes() for path in (tmp_path / "runs").rglob("*") if path.is_file()}
    for where in ("runs", "runs/one"):
        ended = polyfed("watch", where, "--once")
        assert ended.code == 0 and "fedbn, seed 0" in ended.out and "2/2" in ended.out and "finished" in ended.out
        assert "seen pen" in ended.out and "training loss" in ended.out
    last = [json.loads(text) for text in (tmp_path / "runs/one/metrics.jsonl").read_text().splitlines()][-1]
    assert f"{100 * last['accuracy']:.1f}" in ended.out
    assert before == {path: path.read_bytes() for path in (tmp_path / "runs").rglob("*") if path.is_file()}
    (tmp_path / "empty").mkdir()
    assert polyfed("watch", "empty", "--once").code == 0
    refused = polyfed("watch", "nowhere")
    assert refused.code == 2 and "Folder nowhere does not exist." in refused.err
    assert "--every must be a number of seconds above 0" in polyfed("watch", "runs", "--every", "0").err


def test_curves_in_one_line() -> None:
    assert spark([]) == "" and spark([1.0, 1.0]) == "▁▁" and spark(list(range(8))) == "▁▂▃▄▅▆▇█"
    assert len(spark(list(range(1000)))) == 24 and spark([0.0] * 99 + [1.0])[-1] == "█"
