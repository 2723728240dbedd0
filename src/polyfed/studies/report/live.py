"""A run as it stands while it is trained: read from ``run.toml`` and ``metrics.jsonl`` only, which are whole at any instant."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from polyfed.errors import RunFolderError
from polyfed.runs.folder.lock import is_held
from polyfed.runs.folder.manifest import newest_notes
from polyfed.runs.folder.run_folder import RunFolder
from polyfed.runs.scores import VIEWS, headline_by_scores, recorded_headline
from polyfed.studies.report.run_record import MEAN, RunRecord

BLOCKS = "▁▂▃▄▅▆▇█"
WIDTH = 24


@dataclass(frozen=True)
class LiveRun:
    """How far a run is.

    Attributes:
        name: the method, the seed, and the domains nobody trains on.
        method: the method's text.
        seed: the seed.
        round: the last round that wrote something.
        rounds: the rounds that are planned.
        state: training, finished, or stopped.
        measure: the measure of the curves.
        curves: scores by view and domain, in the order of rounds; the mean over domains has the name "mean".
        losses: the mean training loss by round.
    """

    name: str
    method: str
    seed: int
    round: int
    rounds: int
    state: str
    measure: str
    curves: dict[tuple[str, str], list[float]] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)


def look_at(path: str | Path) -> LiveRun:
    """Read how far a run is."""
    folder = RunFolder(path)
    lines = folder.metrics()
    run = RunRecord(str(path), folder.document(), lines)
    measure = (recorded_headline(run.document) or headline_by_scores(str(run.settings["metric"]), run.domains)).measure
    curves: dict[tuple[str, str], list[float]] = {}
    for view in VIEWS:
        for _, table in sorted(run.tables_of(measure)[view].items()):
            domains = [key for key in table if isinstance(key, str)]
            for key in [MEAN, *domains] if len(domains) > 1 else domains:
                name, value = "mean" if key == MEAN else str(key), table[key]
                if math.isfinite(value):
                    curves.setdefault((view, name), []).append(value)
    finished = bool(newest_notes(folder.checkpoints.folder).get("finished"))
    state = "finished" if finished else "training" if is_held(folder.path) else "stopped"
    reached = max((int(line["round"]) for line in lines), default=0)
    means = list(run.mean_losses.values())
    without = f", without {', '.join(run.settings['unseen'])}" if run.settings["unseen"] else ""
    return LiveRun(
        f"{run.method}, seed {run.seed}{without}", run.method, run.seed, reached, run.rounds, state, measure, curves, means
    )


def runs_in(path: str | Path) -> list[Path]:
    """The run folder, or the run folders in a folder of several; none yet is no error, since a comparison may just have begun."""
    home = Path(path)
    if not home.is_dir():
        raise RunFolderError(f"There is no folder {home}. Give a run folder, or a folder that holds run folders.")
    return [home] if (home / "run.toml").is_file() else sorted(file.parent for file in home.glob("*/run.toml"))


def spark(values: Sequence[float]) -> str:
    """A curve in one line of text, from the least to the largest value.

    >>> spark([0.0, 0.5, 1.0])
    '▁▅█'
    """
    if not values:
        return ""
    step = max(1.0, len(values) / WIDTH)
    picked = [values[min(len(values) - 1, int(place * step))] for place in range(min(WIDTH, len(values)))]
    picked[-1] = values[-1]
    low, high = min(picked), max(picked)
    if high <= low:
        return BLOCKS[0] * len(picked)
    return "".join(BLOCKS[round((value - low) / (high - low) * (len(BLOCKS) - 1))] for value in picked)
