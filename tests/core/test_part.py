"""What parts declare, and that a declaration which nothing would read is an error."""

from __future__ import annotations

import ast
import copy
import inspect
import pickle
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import polyfed
from polyfed.core.client import Client, Step
from polyfed.core.method import Method
from polyfed.core.part import DECLARATIONS, Part, declare, declared
from polyfed.core.replies import planned_uploads
from polyfed.errors import JoinError
from polyfed.testing import check_method

SOURCES = Path(polyfed.__file__).parent


@dataclass(frozen=True)
class Term(Part):
    weight: float = 0.0
    reads_data = False
    LIMIT = 3

    def __call__(self, step: Step) -> Any:
        return step.task_loss * self.helper()

    def helper(self) -> float:
        return self.weight


class Misspelt(Term):
    need_features = True


class MisspeltMethod(Term):
    def chek(self, bench: object) -> None: ...


class Undocumented(Term):
    colour = "red"


class NoBase:
    def __call__(self, step: Step) -> Any:
        return step.task_loss


def marked(step: Step) -> Any:
    return step.task_loss


marked.read_data = False  # type: ignore[attr-defined]


def test_a_declaration_that_nothing_reads_fails_check_method() -> None:
    for item, said in [
        (Misspelt(), "Misspelt declares 'need_features', which a part cannot. Did you mean needs_features?"),
        (MisspeltMethod(), "MisspeltMethod declares 'chek', which a part cannot. Did you mean check?"),
        (Undocumented(), "Undocumented declares 'colour', which a part cannot."),
        (NoBase(), "NoBase must have the base class polyfed.Part, or be a function."),
        (marked, "the attribute 'read_data' of the function marked is not read."),
    ]:
        with pytest.raises(JoinError, match=re.escape(f"mine, objective: {said}")):
            check_method(Method("mine", objective=(item,)))


def test_fields_helpers_and_constants_are_no_declarations() -> None:
    joined = Method("mine", objective=(Term(0.5), lambda step: step.task_loss)) + polyfed.parse("fedprox")
    assert [declared(item).reads_data for item in joined.objective] == [False, False, True]


def test_a_function_that_declares_is_a_part_and_stays_that_function() -> None:
    assert planned_uploads.trains and not planned_uploads.uses
    assert planned_uploads.__name__ == "planned_uploads" and list(inspect.signature(planned_uploads).parameters) == ["asked"]
    assert pickle.loads(pickle.dumps(planned_uploads)) is planned_uploads is copy.deepcopy(planned_uploads)
    with pytest.raises(TypeError, match="cannot declare 'stages'"):

        @declare(stages="clip")
        def clip(client: Client) -> None: ...


def test_every_attribute_of_a_part_is_documented_and_typed() -> None:
    values = {name for name in DECLARATIONS if not callable(getattr(Part, name))}
    described = set(re.findall(r"^ {4}(\w+): ", inspect.getdoc(Part) or "", re.MULTILINE))
    assert described == values == set(Part.__annotations__)


def test_nothing_about_a_part_is_found_with_getattr() -> None:
    names = DECLARATIONS | {"runs_the_model", "scores", "notes_account"}
    for file in sorted(SOURCES.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("getattr", "hasattr"):
                asked = node.args[1]
                assert not (isinstance(asked, ast.Constant) and asked.value in names), f"{file.name}:{node.lineno}"
