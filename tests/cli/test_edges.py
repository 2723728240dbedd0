"""Bad input of every kind ends in one sentence and exit code 2, never in a traceback."""

from __future__ import annotations

from hypothesis import HealthCheck, given
from hypothesis import settings as budget
from hypothesis import strategies as st

from helpers.command_line import Command, says

LONG, NUL = "x" * 300, "a\0b"


def test_names_that_no_file_can_have(polyfed: Command) -> None:
    for command in (("resume",), ("evaluate",), ("digest",), ("report",), ("run", "--recipe"), ("show",)):
        for name in (LONG, NUL):
            says(polyfed(*command, name))


def test_numbers_that_are_too_large(polyfed: Command) -> None:
    for number in ("9" * 3900, "1e999", "-1e999", "(1e999,)"):
        says(polyfed("show", f"agc(clip={number})"), "Cannot use")
    many = "9" * 5000
    for option, number in (("--lr", "1e999"), ("--workers", many), ("--checkpoint-every", many), ("--rounds", "9" * 30)):
        says(polyfed("run", "digits-mini", option, number), option.strip("-").replace("-", "_"))


@given(text=st.text(max_size=60) | st.from_regex(r"[a-z_]{1,12}\([a-z]{1,6}=[-0-9e.()\[\]'\"]{0,12}\)", fullmatch=True))
@budget(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_text_of_a_method_ends_in_one_sentence(polyfed: Command, text: str) -> None:
    ended = polyfed("show", "--", text)
    assert ended.code == 0 or (ended.code == 2 and len(ended.err.strip().splitlines()) == 1), ended.err


def test_terminal_escapes_are_shown_not_obeyed(polyfed: Command) -> None:
    ended = polyfed("show", "\x1b[31mred")
    assert "\x1b" not in ended.err and "x1b" in ended.err
