"""The pictures of digits-mini take a second and a half to paint: in a process of tests each split is painted once, then copied."""

from __future__ import annotations

import functools

from polyfed.core.data_types import ArrayExamples
from polyfed.data.sets import digit_recipes, digits_mini
from polyfed.data.sets.digit_recipes import Material

paint = digits_mini._examples
"""The painting itself, for the tests that are about it."""


@functools.cache
def painted(domain: str, split: str) -> ArrayExamples:
    """All pictures of a split."""
    return paint(domain, split, digit_recipes.load_material(), None)


def copied(domain: str, split: str, material: Material, limit: int | None) -> ArrayExamples:
    """The first pictures of a split, in memory of their own: whoever changes them changes nobody else's."""
    whole = painted(domain, split)
    return ArrayExamples(whole.x[:limit].clone(), whole.y[:limit].clone())


def make_digits_mini_once() -> None:
    """Copy pictures that were painted before, from here on."""
    digits_mini._examples = copied
    digit_recipes.load_material = functools.cache(digit_recipes.load_material)
