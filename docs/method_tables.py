"""Markdown tables of the registered methods, made from what they declare: one of all, and three that papers print.

No fact is written here. A table changes when a method's ``Facts``, slots or options do, and a method that is not registered is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from polyfed.core.method import Facts, Method, methods, parse
from polyfed.methods.hfedf import JointRound
from polyfed.registry import Recorded
from polyfed.studies.report.catalogue import first_sentence, options_of, sampled_words
from polyfed.text import read_sum, write_option

Link: TypeAlias = Callable[[str], str]
"""From the name of a method to the address of its page."""

HOME = "polyfed.methods."
MODEL_S = "model's"


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    cells = [list(heads), ["---"] * len(heads), *(list(row) for row in rows)]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in row) + " |" for row in cells)


def own_methods() -> list[str]:
    """The methods of polyfed itself; those of loaded files and other packages are left out."""
    return [name for name in methods.names() if methods.find(name).build.__module__.startswith(HOME)]


def at_defaults(record: Recorded[Method]) -> Method | None:
    """The method with every option at its default; None where one has no default."""
    if any(parameter.default is parameter.empty for parameter in record.signature.parameters.values()):
        return None
    made: Method = record.extra["build_with"]()
    return made


def methods_table(link: Link) -> str:
    """Return all methods with their ideas and declared facts, at their default options."""
    heads = (
        "method",
        "idea",
        "needs batch norm",
        "keeps state at clients",
        "smallest batch",
        "clients may be sampled",
        "leaves a client beyond model entries",
        "messages per round",
    )
    return table(heads, (_method_row(methods.find(name), link) for name in own_methods()))


def _method_row(record: Recorded[Method], link: Link) -> list[str]:
    cells = [f"[{record.name}]({link(record.name)})", first_sentence(record.doc)]
    method = at_defaults(record)
    return cells + (["?"] * 6 if method is None else _fact_cells(method.facts))


def _fact_cells(facts: Facts) -> list[str]:
    return [
        _yes(facts.batch_norm),
        _yes(facts.client_state),
        str(facts.smallest_batch or MODEL_S),
        sampled_words(facts),
        facts.uploads_with_granularity or "nothing",
        facts.messages,
    ]


def _yes(fact: bool) -> str:
    return "yes" if fact else "no"


def options_table(name: str) -> str:
    """The options of one method with their defaults."""
    record = methods.find(name)
    options = options_of(record.signature, record.doc, ())
    if not options:
        return "It has no options."
    return table(("option", "default", "meaning"), map(_option_row, options))


def _option_row(option: Mapping[str, Any]) -> list[str]:
    default = "(needed)" if option["required"] else f"`{write_option(option['default'])}`"
    return [f"`{option['name']}`", default, option["meaning"]]


@dataclass(frozen=True)
class Compared:
    """A row of a paper's table: the paper's name for a method, and its text here."""

    printed: str
    text: str

    @property
    def known(self) -> bool:
        """Whether polyfed has every part of it."""
        return all(call.name in methods.names() for call in read_sum(self.text))


FEDWON_TABLE_7 = (
    Compared("FedAvg", "fedavg"),
    Compared("FedAvg+GN", "fedavg + group_norm"),
    Compared("FedAvg+LN", "fedavg + layer_norm"),
    Compared("FixBN", "fixbn"),
    Compared("SiloBN", "silobn"),
    Compared("FedBN", "fedbn"),
    Compared("FedWon", "fedwon"),
)
HFEDF_TABLE_1 = (
    Compared("pFedHN", "pfedhn"),
    Compared("pFedHN, one step per round", 'pfedhn(server_update="joint")'),
    Compared("hFedF", "hfedf"),
    Compared("hFedF, random embeddings", 'hfedf(embedding="random")'),
    Compared("hFedF, auto-encoder", 'hfedf(embedding="autoencoder")'),
)
GPERXAN_TABLE_1 = (
    Compared("ELCFS", "elcfs"),
    Compared("CCST", "ccst"),
    Compared("COPA", "copa"),
    Compared("FedDG-GA", "feddg_ga"),
    Compared("gPerXAN", "gperxan"),
)


def fedwon_table_7() -> str:
    """What is declared here, under the columns of FedWon's Table 7."""
    return _view(FEDWON_TABLE_7, {"Has no BN": has_no_batch_norm, "Cross-device FL": fits_cross_device})


def hfedf_table_1() -> str:
    """What the methods with a hypernetwork are made of, under the characteristics of hFedF's Table 1."""
    return _view(HFEDF_TABLE_1, {"Synchronous update": updates_synchronously, "Learnable embedding": learns_embeddings})


def gperxan_table_1() -> str:
    """What is declared here, under the columns of gPerXAN's Table 1."""
    columns: dict[str, Callable[[Method], str]] = {
        "Privacy risk": lambda method: method.facts.uploads_with_granularity or "no",
        "Additional communication": additional_messages,
        "Additional computation": lambda method: method.facts.extra_work or "no",
    }
    return _view(GPERXAN_TABLE_1, columns)


def _view(compared: Sequence[Compared], columns: dict[str, Callable[[Method], str]]) -> str:
    here = [(row, parse(row.text)) for row in compared if row.known]
    missing = [row.printed for row in compared if not row.known]
    rows = ([row.printed, f"`{row.text}`", *(cell(method) for cell in columns.values())] for row, method in here)
    made = table(("Method", "here", *columns), rows)
    return made + (f"\n\nIn the paper's table but not in polyfed: {', '.join(missing)}." if missing else "")


def has_no_batch_norm(method: Method) -> str:
    """Whether the trained model is free of batch norm, as far as the method decides it."""
    if method.facts.smallest_batch == 1:
        return "yes"
    return "no" if method.facts.batch_norm else "as the model"


def fits_cross_device(method: Method) -> str:
    """Whether clients can be many, sampled, and without memory."""
    if method.facts.full_participation:
        return "no: all clients in every round"
    return "no: clients keep state" if method.facts.client_state else "yes"


def updates_synchronously(method: Method) -> str:
    """Whether the hypernetwork takes one step a round from all clients together."""
    return _yes(isinstance(method.round, JointRound))


def learns_embeddings(method: Method) -> str:
    """Whether the embeddings of clients are trained with the hypernetwork."""
    generation = getattr(method.round, "generation", None)
    return _yes(getattr(generation, "embedding", None) == "learnt")


def additional_messages(method: Method) -> str:
    """What is exchanged beyond one model each way."""
    facts = method.facts
    if facts.messages == "1":
        return "yes" if facts.data_derived_uploads else "no"
    return f"messages per round: {facts.messages}"
