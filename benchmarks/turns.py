"""Protocol of the contenders: a line on standard input starts a round; a line of JSON on standard output ends it."""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Protocol, TextIO


class CannotTakePart(Exception):
    """This contender is not available; the message contains the reason."""


class Side(Protocol):
    """A contender module: prepares, then runs ``turns.rounds`` rounds, each between ``begin`` and ``end``."""

    def run(self, work: object, contender: object, turns: Turns) -> None: ...


class Turns:
    """The contender's side of the protocol. All other output goes to standard error, which the driver stores."""

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
        """Wait for the driver. If the driver has ended, exit."""
        if not sys.stdin.readline():
            os._exit(1)
        self.started = time.perf_counter()

    def end(self) -> None:
        """Report the end of the round and its duration."""
        seconds = time.perf_counter() - self.started
        self.number += 1
        self.say({"round": self.number, "seconds": seconds})

    @property
    def is_over(self) -> bool:
        """Return True if all rounds have been run."""
        return self.number >= self.rounds

    def say(self, message: dict[str, object]) -> None:
        """Send the driver a message."""
        print(json.dumps(message), file=self.channel, flush=True)
