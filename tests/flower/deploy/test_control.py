"""What ``polyfed serve`` asks of its SuperLink, where that is too busy to answer in time."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

pytest.importorskip("flwr", reason="needs the flower extra: pip install 'polyfed[flower]'")

from polyfed.flower.serve.control import TRIES, Control

RUN = 7
STATUS = SimpleNamespace(status="finished", sub_status="completed", details="")


class Busy:
    """A SuperLink that does not answer in time, so many times."""

    def __init__(self, times: int) -> None:
        self.times, self.asked = times, 0

    def ListRuns(self, request: Any) -> Any:
        self.asked += 1
        if self.asked <= self.times:
            raise httpx.ReadTimeout("The read operation timed out")
        return SimpleNamespace(run_dict={RUN: SimpleNamespace(status=STATUS)})

    def StreamLogs(self, request: Any) -> Iterator[Any]:
        """A line a second; after each of the first lines it breaks off."""
        lines = ["one", "two", "three", "four"]
        for second in range(int(request.after_timestamp), len(lines)):
            yield SimpleNamespace(log_output=lines[second], latest_timestamp=float(second + 1))
            self.asked += 1
            if self.asked <= self.times:
                raise httpx.ReadTimeout("The read operation timed out")


def control(link: Busy) -> Control:
    made = Control.__new__(Control)
    made.client = link  # type: ignore[assignment]
    return made


def test_a_busy_superlink_is_asked_again() -> None:
    assert control(Busy(3)).ended(RUN) == (True, "completed")


def test_one_that_never_answers_is_an_error() -> None:
    link = Busy(TRIES)
    with pytest.raises(httpx.ReadTimeout):
        control(link).ended(RUN)
    assert link.asked == TRIES


def test_a_log_that_breaks_off_goes_on_where_it_was() -> None:
    assert list(control(Busy(2)).log_of(RUN)) == ["one", "two", "three", "four"]
