"""How the slots of several parts become those of one method. Parts that conflict, or would be ignored, raise an error that names them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from polyfed.core.part import declared, refuse_unread
from polyfed.core.slots import SLOTS, Join
from polyfed.errors import JoinError

if TYPE_CHECKING:
    from polyfed.core.method import Method
    from polyfed.core.sharing import Rule


def joined_slots(parts: Sequence[Method]) -> dict[str, Any]:
    for part in parts:
        for name in SLOTS:
            for item in part.items(name):
                refuse_unread(item, f"{part.name}, {name}")
    return {name: _JOINERS[slot.join](parts, name) for name, slot in SLOTS.items()}


def _by_stage(parts: Sequence[Method], slot: str) -> tuple[Any, ...]:
    stages = SLOTS[slot].stages
    placed: list[tuple[int, Method, Any]] = []
    for part in parts:
        for item in getattr(part, slot):
            stage = declared(item).stage
            if stage not in stages:
                raise JoinError(f"{part.name}: {slot} has no stage {stage!r}. There are: {', '.join(s for s in stages if s)}.")
            placed.append((stages.index(stage), part, item))
    placed.sort(key=lambda entry: entry[0])
    for (place, part, item), (other_place, other, other_item) in itertools.pairwise(placed):
        commute = declared(item).commutes and declared(other_item).commutes
        if place == other_place and part is not other and not commute:
            stage = stages[place] or "unnamed"
            raise JoinError(
                f"{part.name} and {other.name} both act on {slot} at the stage {stage!r}, and their order would matter. Use only one of them."
            )
    return tuple(item for _, _, item in placed)


def _in_order(parts: Sequence[Method], slot: str) -> tuple[Any, ...]:
    return tuple(item for part in parts for item in getattr(part, slot))


def _rules(parts: Sequence[Method], slot: str) -> tuple[Rule, ...]:
    """The rules of all parts, each with the name of its part; whether they agree is seen when the plan is made."""
    return tuple(replace(rule, part=part.name) for part in parts for rule in getattr(part, slot))


def _one_owner(parts: Sequence[Method], slot: str) -> Any:
    owners = [part for part in parts if getattr(part, slot) is not None]
    if len(owners) > 1:
        raise JoinError(
            f"{owners[0].name} and {owners[1].name} both want to decide the {slot.replace('_', ' ')}. Use only one of them."
        )
    return getattr(owners[0], slot) if owners else None


def _distinct_names(parts: Sequence[Method], slot: str) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    owner: dict[str, str] = {}
    for part in parts:
        for name, item in getattr(part, slot).items():
            if name in merged:
                raise JoinError(f"{owner[name]} and {part.name} both use the name {name!r} for {slot}. Use only one of them.")
            merged[name], owner[name] = item, part.name
    return merged


def _distinct_by_question(parts: Sequence[Method], slot: str) -> dict[str, dict[str, Any]]:
    merged: dict[str, dict[str, Any]] = {}
    owner: dict[tuple[str, str], str] = {}
    for part in parts:
        for question, items in getattr(part, slot).items():
            for name, item in items.items():
                if (question, name) in owner:
                    raise JoinError(
                        f"{owner[question, name]} and {part.name} both use the name {name!r} for {slot} of {question!r}. Use only one of them."
                    )
                merged.setdefault(question, {})[name], owner[question, name] = item, part.name
    return merged


_JOINERS: Mapping[Join, Callable[[Sequence[Method], str], Any]] = {
    Join.BY_STAGE: _by_stage,
    Join.IN_ORDER: _in_order,
    Join.SUMMED: _in_order,
    Join.MERGED: _rules,
    Join.ONE_OWNER: _one_owner,
    Join.DISTINCT_NAMES: _distinct_names,
    Join.DISTINCT_BY_QUESTION: _distinct_by_question,
}


def refuse_ignored(method: Method) -> None:
    """A part whose slot the round's owner does not use would be ignored."""
    if method.round is None:
        return
    owner = next(part for part in method.parts if part.round is not None)
    uses = declared(method.round).uses
    for part in method.parts:
        ignored = [name for name in part.filled_slots if SLOTS[name].must_be_used and name not in uses]
        if part is not owner and ignored:
            raise JoinError(
                f"{owner.name} holds its own rounds and does not use {ignored[0].replace('_', ' ')}, so {part.name} would be ignored."
            )
