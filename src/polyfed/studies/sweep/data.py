"""The data of a search: training and validation examples as they are, test examples out of reach."""

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
    """Test examples were touched before the settings were chosen."""


@dataclass(frozen=True, eq=False)
class ForbiddenExamples:
    """Stands where test examples would be while settings are searched: it has a size, and nothing in it can be read."""

    whose: str
    count: int

    def _refuse(self) -> NoReturn:
        raise ReadTooSoon(f"The test examples of {self.whose} were touched before the settings were chosen. A search reads none.")

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
    """Settings for data without tests: nothing of an unseen domain but its test set is set aside, and that cannot be read."""
    return replace(settings, unseen_part="test")


def with_validation(data: DataSet, share: float, seed: int, unseen: Collection[str] = ()) -> DataSet:
    """Move a random share of each seen domain's training examples, the same of every class, to validation.

    Args:
        data: domains without a validation part.
        share: the share that is moved.
        seed: decides which examples.
        unseen: domains nobody trains on; they stay as they are.
    """
    if not 0 < share < 1:
        raise SettingError(f"--hold-out takes a share between 0 and 1, such as 0.1, found {share}.")
    seen = [domain for domain in data.domains if domain.name not in unseen]
    having = [domain.name for domain in seen if domain.validation is not None]
    if having:
        raise SettingError(f"{data.name} has validation data of its own ({', '.join(having)}); leave --hold-out out.")
    domains = tuple(domain if domain.name in unseen else _held_out(domain, data.task, share, seed) for domain in data.domains)
    return replace(data, domains=domains, source=f"{data.source}; {share:g} of the training examples held out")


def _held_out(domain: Domain, task: Task, share: float, seed: int) -> Domain:
    strata = task.strata(domain.train).numpy()
    rest, taken = stratified(strata, share, seed) if domain.groups is None else grouped(strata, domain.groups.numpy(), share, seed)
    training, validation = torch.from_numpy(rest).sort().values, torch.from_numpy(taken)
    if not len(training) or not len(validation):
        raise SettingError(
            f"--hold-out {share:g} leaves nothing to train or to validate on in {domain.name} ({len(domain.train)} images)."
        )
    train: Examples = domain.train.subset(training)
    groups = None if domain.groups is None else domain.groups[training]
    return replace(domain, train=train, validation=domain.train.subset(validation), groups=groups)


def need_validation(federation: Federation) -> None:
    """Refuse a federation in which somebody has nothing to validate on."""
    lacking = federation.without_validation()
    if lacking:
        raise DataError(
            f"A search chooses on validation data, and {lacking}. Hold out a share of their training data with --hold-out 0.1 (or a larger one), "
            "or use the data set's own option where it has one, such as validation=0.1."
        )
