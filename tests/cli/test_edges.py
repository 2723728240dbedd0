"""Bad input of every kind ends in one sentence and exit code 2, never in a traceback."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as budget
from hypothesis import strategies as st

from helpers.command_line import Command, says

LONG, NUL = "x" * 300, "a\0b"


@pytest.mark.parametrize("name", [LONG, NUL])
@pytest.mark.parametrize("command", [("resume",), ("evaluate",), ("digest",), ("report",), ("run", "--recipe"), ("show",)])
def test_names_that_no_file_can_have(polyfed: Command, command: tuple[str, ...], name: str) -> None:
    says(polyfed(*command, name))


@pytest.mark.parametrize("number", ["9" * 3900, "1e999", "-1e999", "(1e999,)"])
def test_numbers_that_no_option_can_take(polyfed: Command, number: str) -> None:
    says(polyfed("show", f"agc(clip={number})"), "Cannot use")


@pytest.mark.parametrize(
    "options", [("--lr", "1e999"), ("--workers", "9" * 5000), ("--checkpoint-every", "9" * 5000), ("--rounds", "9" * 30)]
)
def test_settings_that_are_too_large(polyfed: Command, options: tuple[str, str]) -> None:
    says(polyfed("run", "digits-mini", *options), options[0].strip("-").replace("-", "_"))


@given(text=st.text(max_size=60) | st.from_regex(r"[a-z_]{1,12}\([a-z]{1,6}=[-0-9e.()\[\]'\"]{0,12}\)", fullmatch=True))
@budget(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_text_of_a_method_ends_in_one_sentence(polyfed: Command, text: str) -> None:
    ended = polyfed("show", "--", text)
    assert ended.code == 0 or (ended.code == 2 and len(ended.err.strip().splitlines()) == 1), ended.err


def test_terminal_escapes_are_shown_not_obeyed(polyfed: Command) -> None:
    ended = polyfed("show", "\x1b[31mred")
    assert "\x1b" not in ended.err and "x1b" in ended.err
