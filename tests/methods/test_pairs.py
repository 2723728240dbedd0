"""Every pair of methods either composes or says why not; the published table is what the code says."""

from __future__ import annotations

import pytest
from method_pairs import in_general, outcomes, pairs, pairs_table
from method_tables import own_methods

from helpers.method_texts import WITHOUT_BATCH_NORM
from helpers.paths import DOCS
from polyfed.core.method import methods

pytest.importorskip("opacus", reason="pairs with differential privacy need the privacy extra")
PAGE = DOCS / "methods" / "pairs.md"

KNOWN = {
    ("agc", "fedbn"): "",
    ("elcfs", "guiding"): "",
    ("ccst", "elcfs"): "",
    ("gperxan", "guiding"): "already",
    ("fedbn", "fedwon"): "no batch norm",
    ("group_norm", "layer_norm"): "their order matters",
    ("hfedf", "pfedhn"): "both define",
    ("hfedf", "krum"): "would be ignored",
    ("hfedf", "median"): "would be ignored",
    ("hfedf", "trimmed_mean"): "would be ignored",
    ("krum", "pfedhn"): "would be ignored",
    ("median", "pfedhn"): "would be ignored",
    ("pfedhn", "trimmed_mean"): "would be ignored",
    ("feddg_ga", "static_bn"): "cannot be scored at the start of a round",
    ("ccst", "central"): "only one",
    ("copa", "guiding"): "not sent to clients",
    ("elcfs", "fedtan"): "runs the model a second time",
}


def test_pairs_whose_answer_is_known() -> None:
    for pair, why in KNOWN.items():
        found = outcomes(pair)[pair]
        assert (why in found) if why else not found, pair


def test_every_method_composes_with_the_one_underneath() -> None:
    for name in set(own_methods()) - {"fedavg", *WITHOUT_BATCH_NORM}:
        assert not any(outcomes(["fedavg", name]).values()), name


@pytest.mark.slow
def test_every_pair_composes_or_says_why_and_the_published_table_is_up_to_date() -> None:
    """Building all pairs raises nothing but polyfed's own errors: ``outcomes`` catches no other."""
    found = outcomes(own_methods())
    count = len(own_methods())
    assert len(found) == count * (count - 1) // 2
    silent = {pair: why for pair, why in found.items() if why and (len(why) < 30 or not any(name in why.lower() for name in pair))}
    assert not silent
    assert set(own_methods()) <= set(methods.names())
    assert PAGE.read_text(encoding="utf-8") == pairs_table(found), "run: python docs/method_pairs.py docs/methods/pairs.md"


def test_pairs_are_unordered_and_once() -> None:
    assert pairs(["c", "a", "b"]) == [("a", "b"), ("a", "c"), ("b", "c")]


def test_reasons_are_given_in_general() -> None:
    assert in_general("fedbn and silobn disagree on stem.1.bias: whether it is sent.", "fedbn", "silobn") == (
        "A and B disagree on an entry: whether it is sent."
    )
    assert in_general('ccst(style="pixel") + copa: copa is odd.', "ccst", "copa") == "A is odd."
    message = 'fedtan + partialfed_fix(skip=("batch_norm", "head")): fedtan needs more. Leave partialfed_fix out, or fedtan(x=1).'
    assert in_general(message, "fedtan", "partialfed_fix") == "A needs more. Leave B out, or A(x=1)."
    assert (
        in_general("b: the model has none (it has: linear, head). Leave b out.", "a", "b") == "A: the model has none. Leave A out."
    )


def test_the_table_marks_what_composes() -> None:
    known = {("agc", "fedbn"): "", ("agc", "fedwon"): "agc and fedwon clash.", ("fedbn", "fedwon"): "fedbn and fedwon clash."}
    lines = pairs_table(known).splitlines()
    assert "| `agc` | `fedwon` (1) |" in lines and "| `fedbn` | `fedwon` (1) |" in lines
    assert "| 1 | A and B clash. |" in lines
    assert "1 of 3 pairs combine." in lines
