"""Lines that are broken on purpose are caught by the test files that should catch them."""

from __future__ import annotations

import pytest

from break_lines import BREAKS, SOURCE, outcomes


def test_every_line_to_break_is_in_the_source() -> None:
    for each in BREAKS:
        text = (SOURCE / "polyfed" / each.file).read_text()
        assert each.apply(text) != text


@pytest.mark.slow
def test_every_broken_line_is_caught() -> None:
    assert [str(each) for each, caught in outcomes() if not caught] == []
