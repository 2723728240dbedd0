"""Read the progress of a run from ``run.toml`` and ``metrics.jsonl``, which are consistent at any time during training."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from polyfed.errors import RunFolderError
from polyfed.runs.folder.divergence import DIVERGED, read_divergence
from polyfed.runs.folder.lock import is_held
from polyfed.runs.folder.manifest import newest_notes
from polyfed.runs.folder.run_folder import RunFolder
from polyfed.runs.scores import VIEWS, headline_by_scores, recorded_headline
from polyfed.studies.report.run_record import MEAN, RunRecord

BLOCKS = "▁▂▃▄▅▆▇█"
WIDTH = 24


@dataclass(frozen=True)
class LiveRun:
    """The progress of a run.

    Attributes:
        name: Method, seed, and domains held out of training.
        method: Method expression.
        seed: Seed of the run.
        round: Last recorded round.
        rounds: Number of planned rounds.
        state: training, finished, stopped, or where it diverged.
        measure: Metric of the curves.
        curves: Scores per round, by view and domain; the mean over domains is called "mean".
        losses: Mean training loss per round.
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
    divergence = read_divergence(folder)
    stopped = "stopped" if divergence is None else f"{divergence.words}; try --lr {divergence.suggested_lr:g}"
    state = "finished" if finished else "training" if is_held(folder.path) else stopped
    reached = max((int(line["round"]) for line in lines if line["view"] != DIVERGED), default=0)
    means = list(run.mean_losses.values())
    without = f", without {', '.join(run.settings['unseen'])}" if run.settings["unseen"] else ""
    return LiveRun(
        f"{run.method}, seed {run.seed}{without}", run.method, run.seed, reached, run.rounds, state, measure, curves, means
    )


def runs_in(path: str | Path) -> list[Path]:
    """Return the run folder, or the run folders in it; the list is empty if a comparison has just started."""
    folder = Path(path)
    if not folder.is_dir():
        raise RunFolderError(f"Folder {folder} does not exist. Pass a run folder, or a folder of run folders.")
    return [folder] if (folder / "run.toml").is_file() else sorted(file.parent for file in folder.glob("*/run.toml"))


def spark(values: Sequence[float]) -> str:
    """Draw a curve as one line of text, scaled to the range of its values.

    >>> spark([0.0, 0.5, 1.0])
    '▁▅█'
    """
    if not values:
        return ""
    step = max(1.0, len(values) / WIDTH)
    picked = [values[min(len(values) - 1, int(index * step))] for index in range(min(WIDTH, len(values)))]
    picked[-1] = values[-1]
    low, high = min(picked), max(picked)
    if high <= low:
        return BLOCKS[0] * len(picked)
    return "".join(BLOCKS[round((value - low) / (high - low) * (len(BLOCKS) - 1))] for value in picked)
