"""Which two methods can be joined: every pair is built on a tiny model, without training.

python docs/method_pairs.py docs/methods/pairs.md
"""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from method_tables import own_methods, table

from polyfed.core.method import Method, methods
from polyfed.errors import PolyfedError
from polyfed.runs.experiment import Experiment
from polyfed.settings import Settings
from polyfed.testing import TinyNet, tiny_federation

_OPTIONS = r"(?:\((?:[^()]|\([^()]*\))*\))?"
_INTRODUCTION = """# Which methods combine

Most pairs of methods combine with `+`. polyfed rejects the others before training, with an error that gives the reason:

```sh
polyfed show "fedbn + agc"
```

The table lists the pairs that do not combine at default options, on a small model with batch norm. Each pair is in the
row of the name that comes first in the alphabet; the number is the [reason](#reasons). Other options or another model
can change the result. That a pair combines does not mean that it is useful. `python docs/method_pairs.py
docs/methods/pairs.md` generates this page."""


def pairs(names: Iterable[str]) -> list[tuple[str, str]]:
    """All unordered pairs, by name."""
    return list(itertools.combinations(sorted(names), 2))


def outcomes(names: Iterable[str]) -> dict[tuple[str, str], str]:
    """For every pair, why it cannot be joined; empty when it can. Errors other than polyfed's own are not caught."""
    chosen = sorted(names)
    made: dict[str, Method] = {name: methods.find(name).extra["build_with"]() for name in chosen}
    settings = Settings(data="tiny", rounds=2, batch_size=4, lr=0.05, momentum=0.9)
    federation = tiny_federation()
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        model = TinyNet()
    found: dict[tuple[str, str], str] = {}
    for one, other in pairs(chosen):
        try:
            # The model is copied by the experiment, so the pairs do not see each other's surgery.
            Experiment(settings, federation, made[one] + made[other], model)
        except PolyfedError as error:
            found[one, other] = str(error)
        else:
            found[one, other] = ""
    return found


def in_general(message: str, one: str, other: str) -> str:
    """A message with the two methods called A and B, so that pairs with one reason share a footnote; A is named first."""
    call = rf"(?:{re.escape(one)}|{re.escape(other)}|fedavg){_OPTIONS}"
    message = re.sub(rf"^(?:{call} \+ )+{call}: ", "", message)
    either = re.compile(rf"\b({re.escape(one)}|{re.escape(other)})\b")
    letters = dict(zip(dict.fromkeys(either.findall(message)), "AB", strict=False))
    message = either.sub(lambda match: letters[match[1]], message)
    message = re.sub(r" \(it has: [^)]*\)", "", message)
    return re.sub(r"disagree on [\w./]+:", "disagree on an entry:", message)


def cause(reason: str) -> str:
    """Return the first sentence of a reason, without the names that only distinguish slots, layers and model."""
    first = re.split(r"\.\s+(?=[A-Z])", reason)[0].rstrip(".") + "."
    first = re.sub(r"does not use [\w ]+\.", "does not use its slot.", first)
    first = re.sub(r" of TinyNet \([\w., ]+\)", "", first)
    first = re.sub(r"^([AB]): TinyNet has", r"\1: the model has", first)
    return re.sub(r"^[\w.]+ is uploaded", "an entry is uploaded", first)


def pairs_table(found: Mapping[tuple[str, str], str] | None = None) -> str:
    """The page: the exceptions of each method, and the reasons.

    Args:
        found: the outcomes, if they are known already.
    """
    known = outcomes(own_methods()) if found is None else found
    names = sorted({name for pair in known for name in pair})
    general = {pair: cause(in_general(why, *pair)) for pair, why in known.items() if why}
    numbers = {reason: number for number, reason in enumerate(dict.fromkeys(general.values()), start=1)}

    def exceptions(name: str) -> str:
        by_number: dict[int, list[str]] = {}
        for other in names:
            reason = general.get((name, other))
            if reason:
                by_number.setdefault(numbers[reason], []).append(f"`{other}`")
        return "; ".join(f"{', '.join(others)} ({number})" for number, others in sorted(by_number.items()))

    grid = table(("method", "does not combine with"), ([f"`{name}`", exceptions(name)] for name in names if exceptions(name)))
    reasons = table(("no.", "why"), ([str(number), reason] for reason, number in numbers.items()))
    count = f"{len(known) - len(general)} of {len(known)} pairs combine."
    return f"{_INTRODUCTION}\n\n{count}\n\n{grid}\n\n## Reasons\n\nA and B are the two methods, in either order.\n\n{reasons}\n"


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(pairs_table(), encoding="utf-8")
