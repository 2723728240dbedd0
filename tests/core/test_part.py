"""Parts: what they declare, how they are written as text, and how they join."""

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
from hypothesis import given
from hypothesis import strategies as st

import polyfed
from polyfed.core.client import Client, Step
from polyfed.core.method import Facts, Method, load_file, methods, parse
from polyfed.core.part import DECLARATIONS, Part, declare, declared
from polyfed.core.replies import planned_uploads
from polyfed.core.rounds import Exchange, exchange
from polyfed.core.server import Server
from polyfed.errors import JoinError, OptionError, PolyfedError, TextError, UnknownName
from polyfed.testing import check_method
from polyfed.text import read_call, read_sum, write_call
from polyfed.trust import NOTHING, Trust, code_in

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
        (Misspelt(), "Misspelt declares 'need_features', which is not an attribute of polyfed.Part. Did you mean needs_features?"),
        (MisspeltMethod(), "MisspeltMethod declares 'chek', which is not an attribute of polyfed.Part. Did you mean check?"),
        (Undocumented(), "Undocumented declares 'colour', which is not an attribute of polyfed.Part."),
        (NoBase(), "NoBase must have the base class polyfed.Part, or be a function."),
        (marked, "the attribute 'read_data' of the function marked has no effect."),
    ]:
        with pytest.raises(JoinError, match=re.escape(f"mine, objective: {said}")):
            check_method(Method("mine", objective=(item,)))


def test_fields_helpers_and_constants_are_no_declarations() -> None:
    joined = Method("mine", objective=(Term(0.5), lambda step: step.task_loss)) + polyfed.parse("fedprox")
    assert [declared(item).reads_data for item in joined.objective] == [False, False, True]


def test_a_function_that_declares_is_a_part_and_stays_that_function() -> None:
    assert planned_uploads.trains and not planned_uploads.uses
    assert planned_uploads.__name__ == "planned_uploads" and list(inspect.signature(planned_uploads).parameters) == ["context"]
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


def test_the_example_of_the_readme_is_canonical() -> None:
    text = "fedbn + agc(clip=1.28) + fedprox(mu=0.01)"
    assert str(polyfed.parse(text)) == text


@pytest.mark.parametrize(
    "text",
    ["agc(clip=1.28) + fedprox(mu=0.01) + fedbn", "fedprox + agc(1.28) + fedbn", "  fedbn()+agc( clip = 1.28 )+fedprox(0.01)"],
)
def test_order_spaces_and_defaults_do_not_change_the_canonical_text(text: str) -> None:
    assert str(parse(text)) == "fedbn + agc(clip=1.28) + fedprox(mu=0.01)"


def test_plus_in_python_is_plus_in_text() -> None:
    from polyfed.methods.agc import agc
    from polyfed.methods.fedbn import fedbn

    assert str(fedbn() + agc(clip=1.28)) == str(agc(1.28) + fedbn()) == "fedbn + agc(clip=1.28)"


def test_what_is_underneath_is_written_only_where_nothing_else_stands_alone() -> None:
    assert str(parse("group_norm")) == "fedavg + group_norm(groups=32)"
    assert str(parse("fedavg + fedbn")) == "fedbn"
    assert str(parse('fedavg(statistics="first") + fedprox')) == 'fedavg(statistics="first") + fedprox(mu=0.01)'


def test_wrong_texts_say_what_would_be_right() -> None:
    for text, error, says in [
        ("fedbm", UnknownName, "fedbn"),
        ("agc(clipp=1.28)", OptionError, "clip"),
        ("agc(clip='a')", OptionError, "must be float"),
        ("agc(clip=True)", OptionError, "must be float"),
        ("agc(clip=-1.0)", OptionError, "positive"),
        ("fedprox(mu=-0.1)", OptionError, "negative"),
        ("momentum(keep='globl')", OptionError, "global"),
        ("fedavg(statistics='firt')", OptionError, "first"),
        ("group_norm(groups=0)", OptionError, "at least 1"),
        ("", TextError, "empty"),
        ("fedbn +", TextError, "Cannot read"),
        ("fedbn - agc", TextError, "Cannot read"),
        ("__import__('os').system('true')", TextError, "Cannot read"),
        ("agc(clip=__import__('os').getpid())", TextError, "Cannot use"),
        ("agc(**{'clip': 1})", TextError, r"\*\*"),
        ("agc(clip=1.0, clip=2.0)", TextError, "Cannot read"),
        ("(" * 900 + "fedbn" + ")" * 900, TextError, "Cannot read"),
        ("fedbn" + " + fedbn" * 2000, TextError, "characters"),
        ("fedprox + fedprox(mu=0.1)", JoinError, "twice"),
        ("group_norm + layer_norm", JoinError, "group_norm and layer_norm"),
        ("local + fedbn", JoinError, "fedbn has no effect with local"),
        ("local + momentum(keep='global')", JoinError, "has no effect"),
    ]:
        with pytest.raises(error, match=says):
            parse(text)


@given(st.text(max_size=60))
def test_no_text_does_anything_but_parse_or_say_why_not(text: str) -> None:
    try:
        made = parse(text)
    except PolyfedError:
        return
    assert str(parse(str(made))) == str(made)


options = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**6), 10**6)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=10).filter(lambda s: "\x00" not in s and s.isprintable()),
    lambda inner: st.lists(inner, max_size=3).map(tuple),
    max_leaves=4,
)


@given(st.dictionaries(st.sampled_from(["a", "clip", "x_1"]), options, max_size=3))
def test_a_written_call_reads_back_as_the_same_value(named: dict[str, object]) -> None:
    call = read_call(write_call("thing", named))  # type: ignore[arg-type]
    assert (call.name, dict(call.named)) == ("thing", named)


def test_hyphens_are_allowed_in_single_names() -> None:
    assert read_call("digits-mini(per_domain=20)").name == "digits_mini"
    assert [call.name for call in read_sum("a + b(1) + c")] == ["a", "b", "c"]


@exchange(uses=("objective",))
def own_round(server: Server) -> Exchange[None]:
    yield server.request("train", server.sample_clients())


def test_a_part_that_the_round_does_not_use_is_an_error_naming_both() -> None:
    owner = Method("owner", round=own_round)
    with pytest.raises(JoinError, match=r"agc has no effect with owner"):
        owner + parse("agc").parts[-1]
    assert (owner + parse("fedprox").parts[0]).objective


def test_neutral_settings_are_never_ignored() -> None:
    owner = Method("owner", round=own_round)
    assert str(owner + parse("fedprox(mu=0.0)").parts[0] + parse('momentum(keep="none")').parts[-1])


def test_two_owners_of_one_slot_are_named() -> None:
    for slot in ["weighting", "server_step", "round", "newcomer", "predict", "task_loss", "population", "outgoing"]:
        one, other = (Method(name, **{slot: own_round}) for name in ("one", "other"))  # type: ignore[arg-type]
        with pytest.raises(JoinError, match="one and other"):
            one + other


def noise(step: Step) -> None:
    raise AssertionError("never run")


def test_two_gradient_parts_without_a_stage_do_not_commute() -> None:
    one, other = Method("one", gradients=(noise,)), Method("other", gradients=(noise,))
    with pytest.raises(JoinError, match=r"one and other .* order"):
        one + other


def test_answers_must_have_distinct_names() -> None:
    one, other = (Method(name, answers={"hello": noise}) for name in ("one", "other"))
    with pytest.raises(JoinError, match="hello"):
        one + other


def test_facts_add_up() -> None:
    one = Method("one", facts=Facts(client_state=True, smallest_batch=1, data_derived_uploads="styles"))
    other = Method("other", facts=Facts(batch_norm=True, smallest_batch=2, data_derived_uploads="spectra"))
    assert (one + other).facts == Facts(
        batch_norm=True, client_state=True, smallest_batch=2, data_derived_uploads="styles; spectra"
    )


def trusting(file: Path) -> Trust:
    return NOTHING.adding(code_in([str(file)]))


def test_a_users_file_of_methods_is_loaded(tmp_path: Path) -> None:
    file = tmp_path / "my_methods.py"
    file.write_text(
        "import polyfed\n\n@polyfed.register\ndef my_own_method(x: float = 1.0):\n    '''Mine.'''\n    return polyfed.Method('my_own_method')\n"
    )
    try:
        assert load_file(file, trusting(file)) == ["my_own_method"]
        assert str(parse("my_own_method(x=2.0)")) == "my_own_method(x=2.0)"
    finally:
        methods._records.pop("my_own_method", None)


def test_a_file_that_holds_only_a_model_is_loaded(tmp_path: Path) -> None:
    """It was refused, so that a model of one's own could not travel to nodes."""
    file = tmp_path / "my_net.py"
    file.write_text("from torch import nn\n\ndef build(classes):\n    return nn.Sequential(nn.Flatten(), nn.LazyLinear(classes))\n")
    assert load_file(file, trusting(file)) == []
    file.write_text("from torch.nn import Linear\n")
    with pytest.raises(OptionError, match=r"defines no model.*--model my_net:FUNCTION"):
        load_file(file, trusting(file))


def test_bad_files_of_methods_say_why(tmp_path: Path) -> None:
    for text, says in (("x = 1", "registers no method"), ("1/0", "ZeroDivisionError"), ("def (", "SyntaxError")):
        file = tmp_path / "bad.py"
        file.write_text(text)
        with pytest.raises(OptionError, match=says):
            load_file(file, trusting(file))
    missing = tmp_path / "missing.py"
    with pytest.raises(OptionError, match="Method file not found"):
        load_file(missing, trusting(missing))


def test_the_text_of_shared_options_joins_the_docstring() -> None:
    record = methods.find("gperxan")
    assert "    guide: weight of the guiding loss" in record.doc and "    tiny_maps: feature maps with one position" in record.doc

    def factory(strength: float = 1.0) -> Method:
        """Something."""
        return Method("factory")

    with pytest.raises(OptionError, match="'width', which is not an option"):
        polyfed.register(shared_options={"width": "how wide."})(factory)
