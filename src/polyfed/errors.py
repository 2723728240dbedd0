"""Every error a user can meet, in one tree.

PolyfedError
├── TextError        (ValueError)    a method, model or data text that cannot be read
├── UnknownName      (LookupError)   a name no registry knows; says the nearest one
├── OptionError      (TypeError)     an option that does not exist or has a wrong value
├── JoinError        (ValueError)    two parts that disagree, do not commute, or would be ignored
├── SharingError     (ValueError)    a rule that matches nothing, or rules that contradict each other
├── ModelError       (ValueError)    a model that does not fit the data or the method
├── DataError        (ValueError)    missing classes, unreadable images, empty clients
├── SettingError     (ValueError)    a setting of the run that cannot be used
├── ClientFailure    (RuntimeError)  a client's work failed; says which client, round and stage
│   ├── StateLost                    what it keeps between rounds is missing or damaged
│   ├── NotFinite                    its loss or weights became NaN or infinite
│   └── Declined                     it takes no part in this round, for a reason of its own: its privacy budget is spent
├── TooFewReplies    (RuntimeError)  a round could not gather the share of clients it needs
├── RunFolderError   (OSError)       a run folder that cannot be read or written
├── UntrustedCode    (ImportError)   code that only a foreign file names; says what would be run
└── MissingExtra     (ImportError)   an optional dependency is not installed; says what to install

A message says what was asked, what was found, and what would work.
The command line prints it as one sentence and exits with 2.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any


class PolyfedError(Exception):
    """Base of all errors polyfed raises on purpose."""


class TextError(PolyfedError, ValueError):
    """A text form that cannot be parsed."""


class UnknownName(PolyfedError, LookupError):
    """A name that no registry knows."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


class OptionError(PolyfedError, TypeError):
    """An option that does not exist, is missing, or has a value that cannot be used."""


class JoinError(PolyfedError, ValueError):
    """Parts that cannot be joined."""


class SharingError(PolyfedError, ValueError):
    """A sharing rule that matches nothing or contradicts another."""


class ModelError(PolyfedError, ValueError):
    """A model that does not fit the data or the method."""


class DataError(PolyfedError, ValueError):
    """Data that cannot be used as they are."""


class SettingError(PolyfedError, ValueError):
    """A setting of the run that cannot be used."""


class ClientFailure(PolyfedError, RuntimeError):
    """A client's work failed. ``inputs`` holds what it was asked, where the backend records that (``backend="debug"``)."""

    inputs: Any = None


class StateLost(ClientFailure):
    """What a client keeps on its disk is missing, damaged, or not what the server knows."""


class NotFinite(ClientFailure):
    """A loss or an entry became NaN or infinite."""


class Declined(ClientFailure):
    """A client that takes no part in a round, for a reason of its own; the round goes on without it."""


class TooFewReplies(PolyfedError, RuntimeError):
    """Fewer clients answered than the round needs."""


class RunFolderError(PolyfedError, OSError):
    """A run folder that cannot be read or written."""


class UntrustedCode(PolyfedError, ImportError):
    """Code that a run folder, a recipe or a node names, and nobody asked for."""


class MissingExtra(PolyfedError, ImportError):
    """An optional dependency that is not installed."""


MAX_NAMED = 20


def plain_name(name: str) -> str:
    """A name without what does not matter in it: hyphens, underscores and case.

    >>> plain_name("Office-Caltech_10")
    'officecaltech10'
    """
    return name.replace("-", "").replace("_", "").lower()


def same_name(name: str, known: Iterable[str]) -> str | None:
    """The known name that is the same but for hyphens, underscores and case.

    >>> same_name("Fed-BN", ["fedavg", "fedbn"])
    'fedbn'
    """
    names = list(known)
    if name in names:
        return name
    return next((each for each in names if plain_name(each) == plain_name(name)), None)


def nearest(name: str, known: Iterable[str]) -> str:
    """Say the nearest known name, or list what there is.

    >>> nearest("poto", ["photo", "sketch"])
    'Did you mean photo?'
    """
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    if close:
        return f"Did you mean {close[0]}?"
    if len(names) > MAX_NAMED:
        return f"There are {len(names)}, such as {', '.join(names[:MAX_NAMED])}."
    return f"There are: {', '.join(names)}." if names else "There are none."
