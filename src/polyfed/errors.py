"""Errors that polyfed raises, in one tree.

PolyfedError
├── TextError        (ValueError)    a method, model or data expression cannot be parsed
├── UnknownName      (LookupError)   a name is not registered; the message suggests the nearest one
├── OptionError      (TypeError)     an option does not exist or has a wrong value
├── JoinError        (ValueError)    two parts conflict, do not commute, or one has no effect
├── SharingError     (ValueError)    a sharing rule matches nothing, or rules contradict each other
├── ModelError       (ValueError)    a model does not fit the data or the method
├── DataError        (ValueError)    missing classes, unreadable images, empty clients
├── SettingError     (ValueError)    a setting of the run cannot be used
├── ClientFailure    (RuntimeError)  a client failed; the message names the client, round and stage
│   ├── StateLost                    its state is missing or damaged
│   ├── NotFinite                    its loss or weights are NaN or infinite
│   └── Declined                     it does not take part in this round, for example because its privacy budget is spent
├── TooFewReplies    (RuntimeError)  too few clients replied in a round
├── RunFolderError   (OSError)       a run folder cannot be read or written
├── UntrustedCode    (ImportError)   code is named only by a file of another user; the message names the code
└── MissingExtra     (ImportError)   an optional dependency is not installed; the message names the package to install

A message states the problem, then the solution. The command line prints it and exits with code 2.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any


class PolyfedError(Exception):
    """Base class of the errors that polyfed raises."""


class TextError(PolyfedError, ValueError):
    """An expression that cannot be parsed."""


class UnknownName(PolyfedError, LookupError):
    """A name that is not registered."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


class OptionError(PolyfedError, TypeError):
    """An option that does not exist, is missing, or has an invalid value."""


class JoinError(PolyfedError, ValueError):
    """Parts that cannot be joined."""


class SharingError(PolyfedError, ValueError):
    """A sharing rule that matches nothing or contradicts another."""


class ModelError(PolyfedError, ValueError):
    """A model that does not fit the data or the method."""


class DataError(PolyfedError, ValueError):
    """Data that cannot be used."""


class SettingError(PolyfedError, ValueError):
    """A setting of the run that cannot be used."""


class ClientFailure(PolyfedError, RuntimeError):
    """A client that failed. ``inputs`` is its request, if the backend records it (``backend="debug"``)."""

    inputs: Any = None


class StateLost(ClientFailure):
    """Client state on disk that is missing, damaged, or different from what the server expects."""


class NotFinite(ClientFailure):
    """A loss, entry or prediction that is NaN or infinite.

    Attributes:
        reason: What is not finite, and what to do.
        client: The client, ``ALL_CLIENTS``, or an empty string if it is unknown.
        round: The round; 0 if it is unknown.
    """

    def __init__(self, reason: str, client: str = "", round: int = 0) -> None:
        super().__init__(reason, client, round)
        self.reason, self.client, self.round = reason, client, round

    def locate(self, client: str, round: int) -> None:
        """Add the client and round, unless the error already has them."""
        if not self.round:
            self.client, self.round = client, round
            self.args = self.reason, client, round

    def __str__(self) -> str:
        return f"D{format_divergence(self.round, self.client)[1:]}: {self.reason}" if self.round else self.reason


ALL_CLIENTS = "all"
"""Value of ``client`` for all clients."""


def format_divergence(round: int, client: str) -> str:
    """Return where a run diverged.

    >>> format_divergence(3, "pen")
    'diverged in round 3 at client pen'
    """
    place = " at all clients" if client == ALL_CLIENTS else f" at client {client}" if client else ""
    return f"diverged in round {round}{place}"


class Declined(ClientFailure):
    """A client that declines to take part in a round. The round continues without it."""


class TooFewReplies(PolyfedError, RuntimeError):
    """A round with fewer replies than it needs."""


class RunFolderError(PolyfedError, OSError):
    """A run folder that cannot be read or written."""


class UntrustedCode(PolyfedError, ImportError):
    """Code that a run folder, a recipe or a node names, but not the user."""


class MissingExtra(PolyfedError, ImportError):
    """An optional dependency that is not installed."""


MAX_NAMED = 20


def plain_name(name: str) -> str:
    """Return a name without hyphens, underscores and case, for comparison.

    >>> plain_name("Office-Caltech_10")
    'officecaltech10'
    """
    return name.replace("-", "").replace("_", "").lower()


def same_name(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that equals a name except for hyphens, underscores and case.

    >>> same_name("Fed-BN", ["fedavg", "fedbn"])
    'fedbn'
    """
    names = list(known)
    if name in names:
        return name
    return next((each for each in names if plain_name(each) == plain_name(name)), None)


def nearest(name: str, known: Iterable[str]) -> str:
    """Suggest the nearest known name, or list the known names.

    >>> nearest("poto", ["photo", "sketch"])
    'Did you mean photo?'
    """
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    if close:
        return f"Did you mean {close[0]}?"
    if len(names) > MAX_NAMED:
        return f"Choose from {len(names)} names, such as {', '.join(names[:MAX_NAMED])}."
    return f"Choose from: {', '.join(names)}." if names else "There are none."
