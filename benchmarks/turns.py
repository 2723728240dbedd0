"""How a contender is told to run a round: a line on its standard input; it answers with a line of JSON when the round has ended."""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Protocol, TextIO


class CannotTakePart(Exception):
    """This contender does not exist here; the text says why."""


class Side(Protocol):
    """What a module of a contender offers: prepare, then do ``turns.rounds`` rounds, each between ``begin`` and ``end``."""

    def run(self, work: object, contender: object, turns: Turns) -> None: ...


class Turns:
    """The contender's end of the line. Everything else that is printed goes to standard error, which the driver keeps."""

    def __init__(self, rounds: int, channel: TextIO) -> None:
        self.rounds = rounds
        self.channel = channel
        self.number = 0
        self.started = 0.0

    @classmethod
    def on_standard_output(cls, rounds: int) -> Turns:
        """Keep standard output for the driver, and send what others print to standard error."""
        channel = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)
        return cls(rounds, channel)

    def begin(self) -> None:
        """Wait for the driver's word. A driver that has gone ends the process."""
        if not sys.stdin.readline():
            os._exit(1)
        self.started = time.perf_counter()

    def end(self) -> None:
        """Say that the round has ended, and how long it took."""
        seconds = time.perf_counter() - self.started
        self.number += 1
        self.say({"round": self.number, "seconds": seconds})

    @property
    def is_over(self) -> bool:
        """Whether all rounds have been run."""
        return self.number >= self.rounds

    def say(self, message: dict[str, object]) -> None:
        """Send the driver a message."""
        print(json.dumps(message), file=self.channel, flush=True)
