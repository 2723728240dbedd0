"""Costs and requirements of experiments: core-hours per form, available data, and state.

Without data, costs are estimated from measured speeds of the networks, under the assumption that all methods cost as much as the base
method. ``polyfed reproduce NAME --estimate`` measures on the data.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from polyfed.data.registry import data_sets
from polyfed.errors import PolyfedError
from polyfed.papers.files import FORMS, PaperItem, item_names, read_item
from polyfed.papers.grid import Form, PlannedRun, cells_of, planned_runs
from polyfed.papers.reproduction import FOLDER, data_problems
from polyfed.runs.scores import BEST_VALIDATION
from polyfed.settings import FACTS, Settings
from polyfed.studies.compare.estimate import estimate_run
from polyfed.text import Call, read_call

READY, IN_PART, NOT_YET = "can be run", "in part", "not yet"
_SECONDS = 5.0
"""Time limit for measuring one run. An experiment has dozens of runs."""


class _Size(NamedTuple):
    """Numbers of training and test examples and of domains, image side, and model.

    With ``whole``, ``test`` counts all images of the domains, because held-out domains are tested with ``unseen_part="all"``.
    """

    train: int
    test: int
    domains: int
    side: int
    model: str = "resnet18"
    whole: bool = False


_SIZES: Mapping[str, _Size] = {
    "digits-mini": _Size(5 * 240, 5 * 120, 5, 28, "small_cnn"),
    "digits-five": _Size(5 * 7438, 24_007, 5, 28, "six_layer_cnn"),
    "office-caltech10": _Size(2_025, 508, 4, 128, "alexnet_fedwon"),
    "domainnet10": _Size(6 * 105, 4_573, 6, 256, "alexnet_fedwon"),
    "fed-isic2019": _Size(18_597, 4_650, 6, 64, "resnet18"),
    "cifar10": _Size(50_000, 10_000, 1, 32, "resnet20"),
    "tiny-imagenet": _Size(100_000, 10_000, 1, 64, "resnet18"),
    "imagenet": _Size(1_281_167, 50_000, 1, 224, "resnet18"),
    "cityscapes": _Size(2_975, 500, 21, 768, "deeplabv3plus"),
    "camvid": _Size(561, 140, 4, 166, "deeplabv3plus"),
    "pacs": _Size(8_977, 9_991, 4, 96, "hfedf_cnn", whole=True),
    "office-home": _Size(14_029, 15_588, 4, 32, "hfedf_cnn", whole=True),
    "vlcs": _Size(9_656, 10_729, 4, 32, "hfedf_cnn", whole=True),
    "camelyon17": _Size(364_771, 455_964, 5, 96, "densenet121", whole=True),
}
"""From the papers and the home pages of the data sets."""


@functools.cache
def _speeds() -> Mapping[str, Any]:
    return tomllib.loads((Path(__file__).parent / "speeds.toml").read_text(encoding="utf-8"))


def _clients_of(partition: Call, domains: int) -> int:
    if partition.name in ("domain", "natural"):
        return domains
    if partition.name == "domain_even":
        return domains * _option(partition, "clients", 20)
    if partition.name == "domain_parts":
        return domains * _option(partition, "parts", 2)
    return _option(partition, "clients", domains)


def _option(call: Call, name: str, default: int) -> int:
    value = call.named.get(name, default)
    return int(value) if isinstance(value, int | float) else default


def core_seconds(settings: Settings) -> float | None:
    """Estimate the cost of one run. Return None if its data set or network has no measured speed."""
    data = read_call(settings.data)
    size = _SIZES.get(data.name.replace("_", "-"))
    model = read_call(settings.model).name if settings.model else size.model if size else ""
    speed = _speeds().get(model)
    if size is None or not isinstance(speed, Mapping):
        return None
    domains, partition = size.domains - len(settings.unseen), read_call(settings.partition)
    train = _trained_on(data, size) * domains / size.domains
    if partition.name == "domain_parts":
        parts = _option(partition, "parts", 2)
        train *= parts / (_option(partition, "out_of", 0) or parts)
    clients = _clients_of(partition, domains)
    steps = settings.local_steps or max(1.0, settings.local_epochs * train / clients / settings.batch_size)
    rounds: float = settings.rounds
    sampled = settings.sampled(clients)
    if settings.total_epochs is not None:
        rounds = settings.total_epochs * train / (sampled * steps * settings.batch_size)
    pixels = (_option(data, "crop", _option(data, "size", size.side)) / speed["side"]) ** 2
    trained = rounds * sampled * steps
    scorings = max(1, min(rounds, settings.scored_at_end)) + (rounds // settings.evaluate_every if settings.evaluate_every else 0)
    validated = 200 * rounds if settings.selection == BEST_VALIDATION else 0
    tested = size.test - size.train if size.whole and settings.unseen_part == "test" else size.test
    scored = (scorings * tested + validated) * _speeds()["scored"]
    seconds = trained * speed["step"] + (trained * settings.batch_size + scored) * speed["example"] * pixels
    # The measured effect of the precision or memory layout on this network.
    variant = settings.amp if settings.amp != "off" else settings.layout
    return float(seconds * _speeds().get(variant, {}).get(model, 1.0))


def _trained_on(data: Call, size: _Size) -> float:
    if data.named.get("protocol") == "fedbn":
        return min(62.0 * size.domains, size.train) if data.name.startswith("office") else float(size.train)
    wanted = _option(data, "per_domain", 743 if data.name.startswith("digits-five") else 0)
    return float(min(wanted * size.domains, size.train) if wanted else size.train)


def max_core_hours(runs: Iterable[PlannedRun]) -> float | None:
    """Return the core-hours of the most expensive run; None if a run has no estimate or there are no runs."""
    found = [core_seconds(run.settings) for run in runs]
    known = [seconds for seconds in found if seconds is not None]
    return max(known) / 3600 if known and len(known) == len(found) else None


def core_hours(runs: Iterable[PlannedRun]) -> float | None:
    """Return the core-hours of all runs; None if a run has no estimate or there are no runs."""
    found = [(core_seconds(run.settings), run.seeds) for run in runs]
    if not found or any(seconds is None for seconds, _ in found):
        return None
    return sum((seconds or 0.0) * seeds for seconds, seeds in found) / 3600


def estimate_item(item: PaperItem, form: Form, root: str | None, notify: Callable[[str], None]) -> Iterator[dict[str, Any]]:
    """Yield one row per group of runs that differ only in their seed: core-seconds, and how they were estimated."""
    if root is not None:
        form = dataclasses.replace(form, changes={**form.changes, "root": root})
    runs = planned_runs(cells_of(item, form), form)
    absent = data_problems(runs)
    for number, (folder, run) in enumerate(runs.items(), 1):
        notify(f"Measuring {run.words} ({number} of {len(runs)})")
        settings = {name: getattr(run.settings, name) for name in FACTS}
        seconds, how = core_seconds(run.settings), "network speed; data not found"
        if folder not in absent:
            data, method, model = (settings.pop(name) for name in ("data", "method", "model"))
            try:
                seconds, how = estimate_run(data, method, model, _SECONDS, **settings).cpu_seconds, "measured"
            except PolyfedError as error:
                how = f"network speed; measuring failed: {error}"
        yield {
            "run": run.words,
            "method": run.settings.method,
            "seeds": run.seeds,
            "core_seconds": None if seconds is None else seconds * run.seeds,
            "how": how,
        }


def experiment_rows(root: str | None = None, out: str | Path = FOLDER) -> list[dict[str, Any]]:
    here: dict[str, bool] = {}
    return [_row(read_item(name), root, Path(out), here) for name in item_names()]


def experiment_description(name: str) -> dict[str, Any]:
    item = read_item(name)
    return {
        "kind": "experiment",
        **_row(item, None, Path(FOLDER), {}),
        "claim": item.claim,
        "measure": item.measure,
        "seeds": item.seeds,
        "note": item.note,
        "parts": [
            {"name": part.name, "methods": [row.name for row in part.rows], "columns": [column.name for column in part.columns]}
            for part in item.parts
        ],
        "command": f"polyfed reproduce {name} --root DATA",
    }


def _row(item: PaperItem, root: str | None, out: Path, here: dict[str, bool]) -> dict[str, Any]:
    cells = cells_of(item, Form())
    waiting = [cell.why_not.removeprefix("not yet: ") for cell in cells if cell.why_not.startswith("not yet")]
    missing = list(dict.fromkeys([*([item.missing] if item.missing and not waiting else []), *waiting]))
    state = state_of(item)
    forms = [Form(name, planned=state == NOT_YET) for name in FORMS]
    runs = {form.name: planned_runs(cells_of(item, form), form) for form in forms}
    full = runs["full"]
    data = list(dict.fromkeys(run.settings.data for run in full.values()))
    names = list(dict.fromkeys(map(_data_name, data)))
    for text in data:
        if text not in here:
            here[text] = _has_data(text, root)
    return {
        "name": item.name,
        "title": item.title,
        "paper": item.paper,
        "item": item.item,
        "data": names,
        "runs": sum(run.seeds for run in full.values()),
        **{f"core_hours_{form}": core_hours(many.values()) for form, many in runs.items()},
        "data_here": [name for name in names if all(here[text] for text in data if _data_name(text) == name)],
        "state": state,
        "missing": missing,
        "run_folders": {form: _run_folders(many, out) for form, many in runs.items()},
    }


def here_words(row: dict[str, Any]) -> str:
    """Describe whether the data of a row exists on this machine: yes, no, or the number of its data sets."""
    needed, here = row["data"], row["data_here"]
    return "yes" if needed and len(here) == len(needed) else f"{len(here)} of {len(needed)}" if here else "no"


def _data_name(text: str) -> str:
    return read_call(text).name.replace("_", "-")


def state_of(item: PaperItem) -> str:
    """Return whether polyfed can run all, some or none of the cells."""
    cells = [cell for cell in cells_of(item, Form()) if cell.published.exists]
    waiting = [cell for cell in cells if cell.why_not.startswith("not yet")]
    if not cells or len(waiting) == len(cells):
        return NOT_YET
    return IN_PART if waiting or item.missing else READY


def _has_data(text: str, root: str | None) -> bool:
    """Return True if the data exists on this machine, without decoding it."""
    name = read_call(text).name
    if name not in data_sets:
        return False
    record = data_sets.find(name)
    declaration = record.extra.get("declaration")
    if declaration is None:
        return "root" not in record.signature.parameters
    if root is None:
        return False
    with contextlib.suppress(PolyfedError, OSError):
        return bool(declaration.sources_to_check(root))
    return False


def _run_folders(names: Iterable[str], out: Path) -> int:
    return sum(1 for name in names for _ in (out / "runs" / name).glob("*/run.toml"))
