"""What an experiment would cost, from measured speeds of its networks: core-hours in each form, without data or training.

A rule of thumb for lists; ``polyfed reproduce NAME --estimate`` measures on the data instead. Methods are taken to cost what the base
method costs.
"""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polyfed.papers.grid import PlannedRun
from polyfed.runs.scores import BEST_VALIDATION
from polyfed.settings import Settings
from polyfed.text import Call, read_call


@dataclass(frozen=True)
class Size:
    """How large a data set is.

    Attributes:
        train: training examples of all domains.
        test: test examples of all domains.
        domains: how many there are.
        side: of its images.
        model: its default.
        whole: ``test`` counts every image of the domains, as an unseen one is tested with ``unseen_part="all"``.
    """

    train: int
    test: int
    domains: int
    side: int
    model: str = "resnet18"
    whole: bool = False


SIZES: Mapping[str, Size] = {
    "digits-mini": Size(5 * 240, 5 * 120, 5, 28, "small_cnn"),
    "digits-five": Size(5 * 7438, 24_007, 5, 28, "six_layer_cnn"),
    "office-caltech10": Size(2_025, 508, 4, 128, "alexnet_fedwon"),
    "domainnet10": Size(6 * 105, 4_573, 6, 256, "alexnet_fedwon"),
    "fed-isic2019": Size(18_597, 4_650, 6, 64, "resnet18"),
    "cifar10": Size(50_000, 10_000, 1, 32, "resnet20"),
    "tiny-imagenet": Size(100_000, 10_000, 1, 64, "resnet18"),
    "imagenet": Size(1_281_167, 50_000, 1, 224, "resnet18"),
    "cityscapes": Size(2_975, 500, 21, 768, "deeplabv3plus"),
    "camvid": Size(561, 140, 4, 166, "deeplabv3plus"),
    "pacs": Size(8_977, 9_991, 4, 96, "hfedf_cnn", whole=True),
    "office-home": Size(14_029, 15_588, 4, 32, "hfedf_cnn", whole=True),
    "vlcs": Size(9_656, 10_729, 4, 32, "hfedf_cnn", whole=True),
    "camelyon17": Size(364_771, 455_964, 5, 96, "densenet121", whole=True),
}
"""From the papers and the data sets' own pages (spec of the experiments, section 1)."""


@functools.cache
def speeds() -> Mapping[str, Any]:
    """The measured speeds, by model."""
    return tomllib.loads((Path(__file__).parent / "speeds.toml").read_text(encoding="utf-8"))


def clients_of(partition: Call, domains: int) -> int:
    """How many clients a partition makes."""
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
    """What one run would cost; None where its data set or network has no measured speed."""
    data = read_call(settings.data)
    size = SIZES.get(data.name.replace("_", "-"))
    model = read_call(settings.model).name if settings.model else size.model if size else ""
    speed = speeds().get(model)
    if size is None or not isinstance(speed, Mapping):
        return None
    domains, partition = size.domains - len(settings.unseen), read_call(settings.partition)
    train = _trained_on(data, size) * domains / size.domains
    if partition.name == "domain_parts":
        parts = _option(partition, "parts", 2)
        train *= parts / (_option(partition, "out_of", 0) or parts)
    clients = clients_of(partition, domains)
    steps = settings.local_steps or max(1.0, settings.local_epochs * train / clients / settings.batch_size)
    rounds: float = settings.rounds
    asked = settings.sampled(clients)
    if settings.total_epochs is not None:
        rounds = settings.total_epochs * train / (asked * steps * settings.batch_size)
    pixels = (_option(data, "crop", _option(data, "size", size.side)) / speed["side"]) ** 2
    trained = rounds * asked * steps
    scorings = max(1, min(rounds, settings.scored_at_end)) + (rounds // settings.evaluate_every if settings.evaluate_every else 0)
    validated = 200 * rounds if settings.selection == BEST_VALIDATION else 0
    tested = size.test - size.train if size.whole and settings.unseen_part == "test" else size.test
    scored = (scorings * tested + validated) * speeds()["scored"]
    seconds = trained * speed["step"] + (trained * settings.batch_size + scored) * speed["example"] * pixels
    return float(seconds * _faster(model, settings))


def _faster(model: str, settings: Settings) -> float:
    """Return the measured factor of the precision and the layout on the speed of a network; 1 if it was not measured."""
    how = settings.amp if settings.amp != "off" else settings.layout
    return float(speeds().get(how, {}).get(model, 1.0))


def _trained_on(data: Call, size: Size) -> float:
    if data.named.get("protocol") == "fedbn":
        return min(62.0 * size.domains, size.train) if data.name.startswith("office") else float(size.train)
    wanted = _option(data, "per_domain", 743 if data.name.startswith("digits-five") else 0)
    return float(min(wanted * size.domains, size.train) if wanted else size.train)


def max_core_hours(runs: Iterable[PlannedRun]) -> float | None:
    """Return the core-hours of the most expensive run; None if one of them has no estimate, or there are none."""
    found = [core_seconds(run.settings) for run in runs]
    known = [seconds for seconds in found if seconds is not None]
    return max(known) / 3600 if known and len(known) == len(found) else None


def core_hours(runs: Iterable[PlannedRun]) -> float | None:
    """What runs would cost together; None where one of them cannot be said, or there are none."""
    found = [(core_seconds(run.settings), run.seeds) for run in runs]
    if not found or any(seconds is None for seconds, _ in found):
        return None
    return sum((seconds or 0.0) * seeds for seconds, seeds in found) / 3600
