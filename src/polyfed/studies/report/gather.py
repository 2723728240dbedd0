"""Read run folders and group them: runs that differ in the seed become rows, and rows on the same data become a set."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from polyfed.errors import RunFolderError
from polyfed.runs.folder.paths import is_path
from polyfed.studies.report.run_record import DATA_SETTINGS, DEFAULTS, RunRecord, differing, joined, plain_value, recipe
from polyfed.studies.report.run_set import MethodRow, RunSet


def gather(paths: Sequence[str | Path], allow_unfinished: bool = True, allow_damaged: bool = True) -> list[RunSet]:
    """Read run folders and group them by data.

    Args:
        paths: Run folders.
        allow_unfinished: Accept runs that can be resumed. A run that diverged has ended, and is always accepted.
        allow_damaged: Accept runs whose newest checkpoint is damaged.

    Raises:
        RunFolderError: If there are no folders, or if some of them cannot be used; the error lists all of these.
    """
    if not paths:
        raise RunFolderError("polyfed report needs at least one run folder: polyfed report RUN... -o FILE.html")
    runs, problems = [], []
    for path in dict.fromkeys(str(path) for path in paths):
        try:
            runs.append(RunRecord.from_folder(path))
        except RunFolderError as error:
            inside = sorted(file.parent.name for file in Path(path).glob("*/run.toml"))
            hint = f" It contains run folders: {', '.join(inside[:5])}{' and more' if len(inside) > 5 else ''}." if inside else ""
            problems.append(str(error) + hint)
    if problems:
        raise RunFolderError(" ".join(problems))
    for found in (run.unfinished for run in runs if run.unfinished is not None):
        if not (allow_damaged if found.damage else allow_unfinished or found.divergence is not None):
            raise RunFolderError(found.refusal)
    by_data: dict[str, list[RunRecord]] = {}
    for run in runs:
        by_data.setdefault(_data_key(run, exclude=("unseen",)), []).append(run)
    return [found for many in by_data.values() for found in _on_same_data(many)]


def _data_key(run: RunRecord, exclude: Sequence[str] = ()) -> str:
    facts = run.document.get("data", {})
    settings = {name: plain_value(run.settings[name]) for name in DATA_SETTINGS if name not in exclude}
    if is_path(settings["data"]):
        # The path of an image folder depends on the machine; its source contains the number of images per class.
        settings["data"] = Path(settings["data"]).name
    return repr([facts.get("source"), facts.get("classes"), list(settings.values())])


def _on_same_data(runs: Sequence[RunRecord]) -> list[RunSet]:
    """Return one leave-one-out comparison, or a set per choice of unseen domains."""
    unseen = [tuple(run.settings["unseen"]) for run in runs]
    if all(len(names) == 1 for names in unseen) and len(set(unseen)) > 1:
        domains = sorted({name for (name,) in unseen})
        by_seed: dict[str, list[RunRecord]] = {}
        for run in runs:
            by_seed.setdefault(repr((run.method, recipe(run), run.all_options, run.seed)), []).append(run)
        ordered = (sorted(many, key=lambda run: str(run.settings["unseen"][0])) for many in by_seed.values())
        return [_run_set([joined(many, domains) for many in ordered], domains)]
    by_data: dict[str, list[RunRecord]] = {}
    for run in runs:
        by_data.setdefault(_data_key(run), []).append(run)
    return [_run_set(many) for many in by_data.values()]


def _run_set(runs: Sequence[RunRecord], left_out: Sequence[str] = ()) -> RunSet:
    by_method: dict[str, dict[str, list[RunRecord]]] = {}
    for run in runs:
        by_method.setdefault(run.method, {}).setdefault(repr((recipe(run), run.all_options)), []).append(run)
    rows = []
    for method, groups in by_method.items():
        names = differing([many[0] for many in groups.values()])
        options_differ = len({many[0].all_options for many in groups.values()}) > 1
        for many in groups.values():
            label = many[0].all_options if options_differ else method
            details = ", ".join(f"{name}={recipe(many[0])[name]}" for name in names)
            rows.append(MethodRow(f"{label} [{details}]" if details else label, many))
    rows = _mark_missing(rows)
    facts, settings = runs[0].document.get("data", {}), runs[0].settings
    extras = [f"{name} {settings[name]}" for name in ("partition", "few_shot") if settings[name] != DEFAULTS[name]]
    extras += [f"unseen: {', '.join(settings['unseen'])}"] if settings["unseen"] else []
    extras += ["leave-one-out"] if left_out else []
    return RunSet(rows, ", ".join([str(facts.get("name", settings["data"])), *extras]), str(facts.get("source", "")), left_out)


def _mark_missing(rows: Sequence[MethodRow]) -> list[MethodRow]:
    """Mark methods without a finished run for a seed that they started or that another federated method finished."""
    expected = {run.seed for row in rows if not row.is_reference for run in row.records if run.finished}
    marked = []
    for row in rows:
        by_seed = {run.seed: run for run in sorted(row.records, key=lambda run: run.finished)}
        lacking = [seed for seed in sorted(expected | set(by_seed)) if seed not in by_seed or not by_seed[seed].finished]
        marked.append(replace(row, missing={seed: _why_missing(by_seed.get(seed)) for seed in lacking}))
    return marked


def _why_missing(run: RunRecord | None) -> str:
    if run is None:
        return "no run"
    if run.parts and all(part.finished for part in run.parts):
        return "runs without some of the domains are missing"
    return run.state
