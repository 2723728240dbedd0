"""The names that polyfed gives at its root."""

from __future__ import annotations

import pytest

import polyfed


def test_public_names_are_complete_and_importable() -> None:
    assert sorted(polyfed.__all__) == sorted(set(polyfed.__all__))
    for name in polyfed.__all__:
        assert getattr(polyfed, name) is not None
    with pytest.raises(AttributeError, match="nothing_here"):
        polyfed.nothing_here  # noqa: B018
