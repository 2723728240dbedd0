"""Prepare the data of a search, with test examples that cannot be read."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import NoReturn

import torch
from torch import Tensor

from polyfed.core.data_types import DataSet, Domain, Examples, Federation
from polyfed.data.store.splits import grouped, stratified
from polyfed.errors import DataError, SettingError
from polyfed.settings import Settings
from polyfed.tasks.task import Task


class ReadTooSoon(DataError):
    """Test examples were read before the settings were chosen."""


@dataclass(frozen=True, eq=False)
class ForbiddenExamples:
    """A placeholder for test examples during a search. It has a size, but reading from it raises an error."""

    whose: str
    count: int

    def _refuse(self) -> NoReturn:
        raise ReadTooSoon(
            f"The test examples of {self.whose} were read before the settings were chosen. A search must not read them."
        )

    @property
    def labels(self) -> Tensor:
        self._refuse()

    def __len__(self) -> int:
        return self.count

    def batch(self, indices: Tensor | slice) -> tuple[Tensor, Tensor]:
        self._refuse()

    def subset(self, indices: Tensor) -> ForbiddenExamples:
        self._refuse()


def without_tests(data: DataSet) -> DataSet:
    return replace(data, domains=tuple(replace(d, test=ForbiddenExamples(d.name, len(d.test))) for d in data.domains))


def trial_settings(settings: Settings) -> Settings:
    """Return settings that test an unseen domain on its test set only, which a search cannot read."""
    return replace(settings, unseen_part="test")


def with_validation(data: DataSet, fraction: float, seed: int, unseen: Collection[str] = ()) -> DataSet:
    """Move a random, stratified fraction of each seen domain's training examples to validation."""
    if not 0 < fraction < 1:
        raise SettingError(f"--hold-out must be between 0 and 1, such as 0.1; got {fraction}.")
    seen = [domain for domain in data.domains if domain.name not in unseen]
    with_split = [domain.name for domain in seen if domain.validation is not None]
    if with_split:
        raise SettingError(f"{data.name} already has validation data ({', '.join(with_split)}). Remove --hold-out.")
    domains = tuple(domain if domain.name in unseen else _hold_out(domain, data.task, fraction, seed) for domain in data.domains)
    return replace(data, domains=domains, source=f"{data.source}; {fraction:g} of the training examples held out")


def _hold_out(domain: Domain, task: Task, fraction: float, seed: int) -> Domain:
    strata, groups = task.strata(domain.train).numpy(), domain.groups
    split = stratified(strata, fraction, seed) if groups is None else grouped(strata, groups.numpy(), fraction, seed)
    training, validation = torch.from_numpy(split[0]).sort().values, torch.from_numpy(split[1])
    if not len(training) or not len(validation):
        raise SettingError(
            f"--hold-out {fraction:g} leaves no training or no validation images in {domain.name} ({len(domain.train)} images)."
        )
    train: Examples = domain.train.subset(training)
    groups = None if groups is None else groups[training]
    return replace(domain, train=train, validation=domain.train.subset(validation), groups=groups)


def require_validation(federation: Federation) -> None:
    """Raise DataError if a client has no validation data."""
    lacking = federation.without_validation()
    if lacking:
        raise DataError(
            f"A search needs validation data, but {lacking}. Pass --hold-out 0.1 (or more) to hold out training data, or an option of "
            "the data set if it has one, such as validation=0.1."
        )
