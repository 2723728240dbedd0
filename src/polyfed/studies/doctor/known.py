"""What the doctor's numbers are on federations that are known, and from where on a number counts as large.

Measured with ``polyfed doctor NAME --json`` (``docs/doctor.md`` has the commands). The limits were set on digits-mini, on partitions of
CIFAR-10 and on shifts made in code, before any other data set was looked at.
"""

from __future__ import annotations

from collections.abc import Mapping

_MEASURED: Mapping[str, Mapping[str, float]] = {
    "identical clients": {"statistics": 1.02, "gradient bias": 0.95, "label skew": 0.14, "domains": 0.98},
    "one inverted client": {"statistics": 3.29, "gradient bias": 6.42, "label skew": 0.14, "domains": 1.53},
    "darker and darker clients": {"statistics": 5.55, "gradient bias": 6.66, "label skew": 0.14, "domains": 1.37},
    "digits-mini": {"statistics": 6.41, "gradient bias": 2.61, "label skew": 0.0, "domains": 2.56},
    "digits-mini, iid": {"statistics": 1.05, "gradient bias": 1.09, "label skew": 0.07, "domains": 1.02},
    "digits-mini, shards": {"statistics": 1.39, "gradient bias": 1.47, "label skew": 0.8},
    "CIFAR-10, iid": {"statistics": 1.03, "gradient bias": 1.07, "label skew": 0.01, "domains": 1.0},
    "CIFAR-10, Dirichlet 0.1": {"statistics": 2.22, "gradient bias": 1.46, "label skew": 0.69, "domains": 1.13},
    "CIFAR-10, shards": {"statistics": 3.06, "gradient bias": 1.51, "label skew": 0.8, "domains": 1.14},
}
_SIZES: Mapping[str, tuple[int, float]] = {
    "identical clients": (28, 0.14),
    "one inverted client": (28, 0.14),
    "darker and darker clients": (28, 0.14),
    "digits-mini": (12, 0.14),
    "digits-mini, iid": (12, 0.14),
    "digits-mini, shards": (12, 0.14),
    "CIFAR-10, iid": (8, 1.09),
    "CIFAR-10, Dirichlet 0.1": (2, 1.09),
    "CIFAR-10, shards": (8, 1.09),
}
"""By federation: images in the smallest batch, and megabytes of the model; all of them without sampling."""

KNOWN: Mapping[str, Mapping[str, float]] = {
    name: {**numbers, "smallest batch": _SIZES[name][0], "sampling": 1.0, "model": _SIZES[name][1]}
    for name, numbers in _MEASURED.items()
}
"""By federation: the numbers, by the names of findings."""

TINY_BATCH = 4
"""Batches up to this size have statistics that say little."""
SELDOM = 0.5
"""Clients that take part in a smaller share of rounds keep state that ages."""
BIAS = 1.25
"""Bias of batch norm in multiples of what chance gives, from which on clients' batches are too different."""
SHIFT = 1.25
"""Distance of statistics in multiples of what chance gives, from which on clients differ."""
NAMED = 2.0
"""A client is named where its distance is so many times what chance gives,"""
APART = 1.5
"""and so many times the median one."""
DOMAINS = 1.25
"""Distance in feature space in multiples of what chance gives, from which on clients are different domains."""
LABELS = 0.3
"""Total variation of labels, from which on they are skewed."""
