"""The commands that repeat runs: one for each run, and one for a whole comparison where a comparison made them."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from polyfed.core.method import parse
from polyfed.errors import PolyfedError
from polyfed.runs.training_settings import GIVEN
from polyfed.studies.compare.candidates import common_to_all
from polyfed.studies.compare.compare import LEAVE_ONE_OUT, LEAVE_ONE_OUT_DEFAULTS
from polyfed.studies.report.run_record import DEFAULTS, RunRecord, run_folders

APART = ("data", "method", "seed")
"""Settings that commands write in a place of their own."""


def command(run: RunRecord) -> str:
    """The command that repeats a run, quoted for a shell; a comment where only Python or Flower's nodes can."""
    given = run.document.get("given_in_python", [])
    if given:
        return f"# {run.method}, seed {run.seed}: begun in Python, with: {', '.join(given)}. It needs them again."
    words = ["polyfed", "run", str(run.settings["data"]), "--method", method_then(run)]
    return shlex.join([*words, *options(run.settings, DEFAULTS, APART, given_values(run)), "--seed", str(run.seed)])


def given_values(run: RunRecord) -> list[str]:
    """Settings that were given although a data set or a model may declare others: a default, too, must be given again."""
    return [name for name, origin in run.document.get("origins", {}).items() if origin == GIVEN]


def options(
    settings: Mapping[str, Any], defaults: Mapping[str, Any], but: Collection[str], given: Collection[str] = ()
) -> Iterator[str]:
    """Settings that are not the defaults, and those that were given, as options."""
    for name, default in defaults.items():
        value = settings[name]
        is_default = name not in given and (value == default or (isinstance(value, list) and tuple(value) == default))
        if name in but or value is None or is_default:
            continue
        for one in value if isinstance(value, list | tuple) else [value]:
            yield from (f"--{name.replace('_', '-')}", str(one))


def method_then(run: RunRecord) -> str:
    """The method's text; with all its options where the text alone means something else today."""
    try:
        same = parse(run.method).full_text == run.all_options
    except PolyfedError:
        same = False
    return run.method if same or not run.all_options else run.all_options


def compare_command(runs: Sequence[RunRecord], left_out: Collection[str] = ()) -> str | None:
    """The one ``polyfed compare`` that makes all these runs and no others; None where there is none.

    Args:
        runs: run folders of one group.
        left_out: the domains they leave out in turn.
    """
    seeds = sorted({run.seed for run in runs})
    methods: dict[str, RunRecord] = {}
    for run in runs:
        methods.setdefault(method_then(run), run)
    whole = len(runs) == len(methods) * len(seeds) * max(1, len(left_out))
    one_after_another = seeds == list(range(seeds[0], seeds[0] + len(seeds)))
    if len(methods) < 2 or any(run.document.get("given_in_python") for run in runs) or not (whole and one_after_another):
        return None
    if left_out and any({*run.settings["unseen"], *_trained_on(run)} != set(left_out) for run in runs):
        return None
    but = {*APART, "unseen"} if left_out else set(APART)
    own = _own_settings(runs, but)
    if own is None:
        return None
    defaults = {**DEFAULTS, **LEAVE_ONE_OUT_DEFAULTS} if left_out else DEFAULTS
    texts = [
        with_own(
            method, {name: value for name in own if (value := run.settings[name]) != DEFAULTS[name] or name in given_values(run)}
        )
        for method, run in methods.items()
    ]
    words = ["polyfed", "compare", str(runs[0].settings["data"]), "--methods", "; ".join(texts)]
    words += ["--protocol", LEAVE_ONE_OUT] * bool(left_out)
    words += options(runs[0].settings, defaults, {*but, *own}, given_values(runs[0]))
    words += ["--seed", str(seeds[0])] * (seeds[0] != DEFAULTS["seed"])
    return shlex.join([*words, *(["--seeds", str(len(seeds))] * (len(seeds) > 1))])


def with_own(method: str, own: Mapping[str, Any]) -> str:
    """A method with settings of its own, as ``--methods`` takes it."""
    return f"{method} with {', '.join(f'{name}={value}' for name, value in own.items())}" if own else method


def _trained_on(run: RunRecord) -> set[str]:
    return {domain for domains in run.document.get("outline", {}).get("domains", []) for domain in domains}


def _own_settings(runs: Sequence[RunRecord], but: Collection[str]) -> list[str] | None:
    """Settings in which methods differ; None where a comparison could not give each method its own."""
    found = [name for name in DEFAULTS if name not in but and len({repr(run.settings[name]) for run in runs}) > 1]
    for name in found:
        by_method = {(method_then(run), repr(run.settings[name])) for run in runs}
        written = all(isinstance(run.settings[name], str | int | float) for run in runs)
        if common_to_all(name) or not written or len(by_method) != len({method for method, _ in by_method}):
            return None
    return found


def report_command(runs: Sequence[str | Path], out: str | Path) -> str:
    """The command that writes a page again; a folder of runs stands for all that it holds."""
    named = list(dict.fromkeys(map(str, runs)))
    for parent in dict.fromkeys(Path(one).parent for one in named):
        inside = [str(path) for path in run_folders([parent])] if any(parent.glob("*/run.toml")) else []
        if len(inside) > 1 and set(inside) <= set(named):
            named = [str(parent), *(one for one in named if one not in inside)]
    return shlex.join(["polyfed", "report", *named, "-o", str(out)])


def pieces(text: str) -> list[str]:
    """A command in pieces that stay together on a line: an option with its value."""
    found: list[str] = []
    for word in shlex.split(text) if not text.startswith("#") else [text]:
        quoted = word if text.startswith("#") else shlex.quote(word)
        if found and found[-1].startswith("--") and " " not in found[-1] and not word.startswith("--"):
            found[-1] += f" {quoted}"
        else:
            found.append(quoted)
    return found
