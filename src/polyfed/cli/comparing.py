"""The work behind ``polyfed compare``: train what is missing, read what is there."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polyfed.cli.output import show_progress, warn
from polyfed.cli.run import slug
from polyfed.cli.runs_bar import runs_bar
from polyfed.errors import PolyfedError

if TYPE_CHECKING:
    from polyfed.experiment import Experiment
    from polyfed.folder import RunFolder
    from polyfed.report.tables import MethodRow
    from polyfed.result import Result
    from polyfed.run import Observer
    from polyfed.settings import Settings

NOT_COMPARED: dict[str, Any] = {"checkpoint_every": "60s", "workers": "1"}
"""Settings that change nothing in a result."""


@dataclass(frozen=True)
class Job:
    """One run of a comparison."""

    method: str
    seed: int
    left_out: str | None
    settings: Settings

    @property
    def name(self) -> str:
        """The name of its run folder."""
        return f"{slug(self.method)}-seed{self.seed}" + (f"-without-{slug(self.left_out)}" if self.left_out else "")

    @property
    def words(self) -> str:
        """What it is, for people."""
        return f"{self.method}, seed {self.seed}" + (f", without {self.left_out}" if self.left_out else "")


class Comparison:
    """Runs jobs on data that are made once."""

    def __init__(self, settings: Settings, folder: Path, quiet: bool) -> None:
        from polyfed.build import build_data_set

        self.settings, self.folder, self.quiet = settings, folder, quiet
        self.data = build_data_set(settings.data, settings)
        self.domains = [domain.name for domain in self.data.domains]
        self.source = self.data.source
        self.test_sizes: dict[str, int] = {}
        self.rounds = 0
        self.told: set[str] = set()
        self.reused = 0

    def rows(self, jobs: Sequence[Job]) -> list[MethodRow]:
        """A row for each method, in the order of the jobs; a method that fails is given up, the others go on."""
        from polyfed.report.tables import MethodRow, method_row

        found: dict[str, dict[int, list[dict[str, Any]]]] = {}
        problems = self.unfit(jobs)
        with runs_bar(self.quiet) as bar:
            for number, job in enumerate(jobs, 1):
                by_seed = found.setdefault(job.method, {})
                bar.begin(job.words, number, len(jobs))
                if job.method not in problems:
                    try:
                        by_seed.setdefault(job.seed, []).append(self.run(job, bar.round))
                    except PolyfedError as error:
                        problems[job.method] = str(error)
                        self.tell([f"{job.method} is given up: {error}"])
        if self.reused and not self.quiet:
            print(f"{self.reused} of {len(jobs)} runs were in {self.folder} already and are used as they are.", file=sys.stderr)
        return [
            MethodRow(method, problem=problems[method])
            if method in problems
            else method_row(method, [_one(v) for v in by_seed.values()])
            for method, by_seed in found.items()
        ]

    def unfit(self, jobs: Sequence[Job]) -> dict[str, str]:
        """Methods that cannot be built here, and why; said before the others train, which may take hours."""
        from polyfed.experiment import Experiment
        from polyfed.simulate.in_process import InProcess

        first: dict[str, Job] = {}
        for job in jobs:
            first.setdefault(job.method, job)
        problems: dict[str, str] = {}
        for method, job in first.items():
            try:
                Experiment(job.settings, self.data, delivery=InProcess)
            except PolyfedError as error:
                problems[method] = str(error)
                self.tell([f"{method} will be left out: {error}"])
        return problems

    def run(self, job: Job, advance: Observer) -> dict[str, Any]:
        """The outcome of one job: read, resumed or trained."""
        from polyfed.experiment import Experiment
        from polyfed.observers import record, resume
        from polyfed.report.tables import domain_rows, outcome

        experiment = Experiment(job.settings, self.data)
        self.tell(experiment.notices)
        folder, exists = self.place(job, experiment)
        held: list[int] = []
        watching = (advance, lambda server: held.append(server.round))
        result: Result = (
            resume(folder.path, self.data, notify=warn, observers=watching)
            if exists
            else record(experiment, folder, observers=watching)
        )
        self.reused += exists and not held
        made = outcome(result)
        self.rounds = result.experiment.server.round
        scored = [row for row in domain_rows(made) if job.left_out is None or row.view == "unseen"]
        self.test_sizes |= {row.domain: row.count for row in scored}
        if not self.quiet and not show_progress(self.quiet):
            done = "trained" if not exists else "resumed" if held else "reused"
            print(f"{job.words}: mean {100 * made['accuracy']['mean']:.1f} %, {done}", file=sys.stderr)
        return made

    def tell(self, notices: Sequence[str]) -> None:
        """Say each notice once."""
        for notice in notices:
            if notice not in self.told and not self.quiet:
                warn(notice)
            self.told.add(notice)

    def place(self, job: Job, experiment: Experiment) -> tuple[RunFolder, bool]:
        """The folder of a job, and whether it holds this run; folders of other runs are passed over."""
        from polyfed.folder import RunFolder

        number = 1
        while True:
            folder = RunFolder(self.folder / (job.name if number == 1 else f"{job.name}-{number}"))
            if not folder.path.exists():
                return folder, False
            if (folder.path / "run.toml").is_file() and _same(folder, experiment):
                return folder, True
            number += 1


def _same(folder: RunFolder, experiment: Experiment) -> bool:
    """Whether a run has the settings and data of an experiment, and its method the same options: a default may have changed since."""
    from polyfed.data.identity import identity_of
    from polyfed.paths import anchored

    settings = (folder.settings(), anchored(experiment.settings))
    one, other = (dataclasses.replace(each, **NOT_COMPARED) for each in settings)
    same_options = folder.document().get("method", {}).get("all_options") == experiment.method.full_text
    return one == other and same_options and not folder.other_data(identity_of(experiment.federation))


def _one(outcomes: list[dict[str, Any]]) -> dict[str, Any]:
    """One outcome for a seed; several are runs that each left out one domain."""
    from polyfed.report.tables import left_out_in_turn

    return outcomes[0] if len(outcomes) == 1 else left_out_in_turn(outcomes)
