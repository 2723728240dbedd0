"""Reconstruct the commands that reproduce runs, comparisons and reports."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from polyfed.core.method import parse
from polyfed.errors import PolyfedError
from polyfed.runs.training_settings import GIVEN, VALIDATED
from polyfed.studies.compare.candidates import common_to_all
from polyfed.studies.compare.compare import LEAVE_ONE_OUT, LEAVE_ONE_OUT_DEFAULTS
from polyfed.studies.report.run_record import DEFAULTS, RunRecord, run_folders

POSITIONAL = ("data", "method", "seed")
"""Settings that commands do not pass in the general list of options."""


def command(run: RunRecord) -> str:
    """Return the shell command that repeats a run; a comment if the run used Python objects."""
    given = run.document.get("given_in_python", [])
    if given:
        return f"# {run.method}, seed {run.seed}: started in Python with: {', '.join(given)}. Pass them to repeat the run."
    arguments = ["polyfed", "run", str(run.settings["data"]), "--method", _recorded_method(run)]
    return shlex.join([*arguments, *options(run.settings, DEFAULTS, POSITIONAL, _given_settings(run)), "--seed", str(run.seed)])


def _given_settings(run: RunRecord) -> list[str]:
    """Return settings to repeat even if they are defaults, because the data set or the model may declare other values."""
    return [name for name, origin in run.document.get("origins", {}).items() if origin in (GIVEN, VALIDATED)]


def options(
    settings: Mapping[str, Any], defaults: Mapping[str, Any], exclude: Collection[str], given: Collection[str] = ()
) -> Iterator[str]:
    """Yield the options for all settings that are in ``given`` or differ from the defaults."""
    for name, default in defaults.items():
        value = settings[name]
        is_default = name not in given and (value == default or (isinstance(value, list) and tuple(value) == default))
        if name in exclude or value is None or is_default:
            continue
        for one in value if isinstance(value, list | tuple) else [value]:
            yield from (f"--{name.replace('_', '-')}", str(one))


def _recorded_method(run: RunRecord) -> str:
    """Return the method expression, with all options if their defaults have changed since the run."""
    try:
        same = parse(run.method).full_text == run.all_options
    except PolyfedError:
        same = False
    return run.method if same or not run.all_options else run.all_options


def compare_command(runs: Sequence[RunRecord], left_out: Collection[str] = ()) -> str | None:
    """Return the ``polyfed compare`` command that creates exactly these runs, or None if there is none.

    Args:
        runs: Runs of one group.
        left_out: Domains of a leave-one-out comparison.
    """
    seeds = sorted({run.seed for run in runs})
    methods: dict[str, RunRecord] = {}
    for run in runs:
        methods.setdefault(_recorded_method(run), run)
    is_complete = len(runs) == len(methods) * len(seeds) * max(1, len(left_out))
    is_range = seeds == list(range(seeds[0], seeds[0] + len(seeds)))
    if len(methods) < 2 or any(run.document.get("given_in_python") for run in runs) or not (is_complete and is_range):
        return None
    for run in runs if left_out else ():
        trained = {domain for domains in run.document.get("outline", {}).get("domains", []) for domain in domains}
        if {*run.settings["unseen"], *trained} != set(left_out):
            return None
    exclude = {*POSITIONAL, "unseen"} if left_out else set(POSITIONAL)
    differing = _per_method_settings(runs, exclude)
    if differing is None:
        return None
    specs = []
    for method, run in methods.items():
        changed = [name for name in differing if run.settings[name] != DEFAULTS[name] or name in _given_settings(run)]
        values = ", ".join(f"{name}={run.settings[name]}" for name in changed)
        specs.append(f"{method} with {values}" if values else method)
    arguments = ["polyfed", "compare", str(runs[0].settings["data"]), "--methods", "; ".join(specs)]
    arguments += ["--protocol", LEAVE_ONE_OUT] * bool(left_out)
    defaults = {**DEFAULTS, **LEAVE_ONE_OUT_DEFAULTS} if left_out else DEFAULTS
    arguments += options(runs[0].settings, defaults, {*exclude, *differing}, _given_settings(runs[0]))
    arguments += ["--seed", str(seeds[0])] * (seeds[0] != DEFAULTS["seed"])
    return shlex.join([*arguments, *(["--seeds", str(len(seeds))] * (len(seeds) > 1))])


def _per_method_settings(runs: Sequence[RunRecord], exclude: Collection[str]) -> list[str] | None:
    """Return the settings that differ between methods; None if one of them cannot be set per method."""
    found = [name for name in DEFAULTS if name not in exclude and len({repr(run.settings[name]) for run in runs}) > 1]
    for name in found:
        by_method = {(_recorded_method(run), repr(run.settings[name])) for run in runs}
        is_scalar = all(isinstance(run.settings[name], str | int | float) for run in runs)
        if common_to_all(name) or not is_scalar or len(by_method) != len({method for method, _ in by_method}):
            return None
    return found


def report_command(runs: Sequence[str | Path], out: str | Path) -> str:
    """Return the command that recreates a report; a parent folder replaces its runs if all of them are in the report."""
    paths = list(dict.fromkeys(map(str, runs)))
    for parent in dict.fromkeys(Path(path).parent for path in paths):
        inside = [str(path) for path in run_folders([parent])] if any(parent.glob("*/run.toml")) else []
        if len(inside) > 1 and set(inside) <= set(paths):
            paths = [str(parent), *(path for path in paths if path not in inside)]
    return shlex.join(["polyfed", "report", *paths, "-o", str(out)])


def pieces(text: str) -> list[str]:
    """Split a command into pieces that stay on one line: an option and its value."""
    if text.startswith("#"):
        return [text]
    found: list[str] = []
    for argument in shlex.split(text):
        if found and found[-1].startswith("--") and " " not in found[-1] and not argument.startswith("--"):
            found[-1] += f" {shlex.quote(argument)}"
        else:
            found.append(shlex.quote(argument))
    return found
