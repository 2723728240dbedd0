"""Help: commands and options in groups, twelve options first, what was probably meant, and nothing heavy imported for it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest

from helpers.command_line import Command, says
from helpers.paths import SOURCE
from polyfed.cli.commands import commands, entries, imported
from polyfed.cli.guard import OPTION_SYNONYMS, SYNONYMS
from polyfed.cli.help import GROUPS
from polyfed.cli.main import app
from polyfed.settings import FACTS

MANY = ("run", "compare", "sweep")


def options_shown(text: str) -> list[str]:
    return re.findall(r"^│ (--[a-z-]+)", text, re.MULTILINE)


def every_command() -> list[tuple[str, ...]]:
    found: list[tuple[str, ...]] = []
    for name in entries():
        inner = getattr(imported(entries()[name]), "commands", {})
        found += [(name, each) for each in inner] or [(name,)]
    return found


def test_help_lists_every_command_in_its_group_on_one_line(polyfed: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    shown = polyfed("--help").out
    for group, listed in commands().items():
        panel = shown[shown.index(f"─ {group} ─") :]
        for entry in filter(lambda entry: entry.is_available, listed):
            assert re.search(rf"^│ {entry.name} +{re.escape(entry.line)} +│$", panel, re.MULTILINE), entry.name
    assert max(map(len, shown.splitlines())) == 80
    assert polyfed().out == shown


def test_every_command_has_help_with_an_example_and_without_types_of_python(polyfed: Command) -> None:
    for command in every_command():
        for flag in ("--help", "--help-all") if command[0] in MANY else ("--help",):
            shown = polyfed(*command, flag)
            assert shown.code == 0 and "Example" in shown.out, command
            assert not re.search(r"<bool>|BOOLEAN|<class '|None|Sentinel|…", shown.out), command
            if flag == "--help" and command[0] in MANY:
                assert len(options_shown(shown.out)) == 12 + len(("--help-all", "--help")), command


def test_help_all_has_every_setting_in_its_group(polyfed: Command) -> None:
    first, everything = polyfed("run", "--help").out, polyfed("run", "--help-all").out
    assert f"Show all {len(options_shown(everything)) - 2} options, in groups." in first
    titles = re.findall(r"^╭─ (.+?) ─", everything, re.MULTILINE)
    assert titles == ["Arguments", "Options", *GROUPS]
    assert titles[2:] == ["Data", "Model and method", "Training", "Clients", "Evaluation", "Speed", "Output"]
    for name, facts in FACTS.items():
        panel = everything[everything.index(f"─ {facts.group} ─") :].partition("╰")[0]
        assert name == "data" or f"--{name.replace('_', '-')}" in panel, (facts.group, name)


def test_every_synonym_stands_for_something() -> None:
    names = {entry.name for group in commands().values() for entry in group}
    assert set(SYNONYMS.values()) <= names and not set(SYNONYMS) & names
    known = {option for name in entries() for param in imported(entries()[name]).params for option in param.opts}
    assert {f"--{ours}" for ours in OPTION_SYNONYMS.values()} <= known


def test_what_was_meant_is_suggested(polyfed: Command) -> None:
    for words, sentence in (
        (["tain"], "Unknown command 'tain'. To train, use polyfed run."),
        (["train"], "Unknown command 'train'. To train, use polyfed run."),
        (["rnu"], "Unknown command 'rnu'. Did you mean run?"),
        (["Compare"], "Unknown command 'Compare'. Did you mean compare?"),
        (["xyzzy"], "Unknown command 'xyzzy'. Run polyfed --help for a list."),
        (["run", "--learning-rate", "1"], "Unknown option --learning-rate. Did you mean --lr? See polyfed run --help."),
        (["run", "--ruonds", "1"], "Unknown option --ruonds. Did you mean --rounds? See polyfed run --help."),
        (["run", "--batch_size", "1"], "Unknown option --batch_size. Did you mean --batch-size? See polyfed run --help."),
        (["run", "--dataset", "x"], "Unknown option --dataset. DATA is an argument: polyfed run DATA. See polyfed run --help."),
        (["ls", "--xyzzy"], "Unknown option --xyzzy. See polyfed ls --help."),
        (["data", "chek"], "Unknown command 'chek'. Did you mean check? See polyfed data --help."),
        (
            ["compare", "digits-mini", "--methods", "fedavg", "fedbn"],
            "Got unexpected extra argument (fedbn). Separate methods with ; and put them in quotes: "
            '--methods "fedavg; fedbn". See polyfed compare --help.',
        ),
        (["ls", "methods", "all"], "Got unexpected extra argument (all). The command takes [KIND]. Put arguments with spaces in quotes. See polyfed ls --help."),
    ):  # fmt: skip
        ended = polyfed(*words)
        says(ended)
        assert ended.err == f"polyfed: {sentence}\n"


def test_a_group_without_a_command_shows_its_help(polyfed: Command) -> None:
    ended = polyfed("data")
    assert ended.code == 2 and ended.out == polyfed("data", "--help").out and ended.err == ""


def test_ls_without_a_kind_lists_the_kinds(polyfed: Command) -> None:
    shown = polyfed("ls")
    assert shown.code == 0
    for kind in ("methods", "data", "models", "partitions", "losses", "recipes", "experiments"):
        assert re.search(rf"^ {kind} ", shown.out, re.MULTILINE)
    assert "Show details with polyfed show NAME." in shown.out
    assert polyfed("ls", "--json").json["kinds"][0] == "methods"
    assert polyfed("ls", "Losses").out == polyfed("ls", "losses").out


def test_help_imports_neither_torch_nor_any_command() -> None:
    script = """
import sys
from types import SimpleNamespace
from polyfed.cli.commands import entries
from polyfed.cli.main import app

def call(*words):
    try:
        app([*words, "--help"], prog_name="polyfed")
    except SystemExit as end:
        assert not end.code, words

call()
commands = {entry.home.split(':')[0] for entry in entries().values()}
heavy = {"torch", "numpy", "rich.markdown", "typer"} | commands
assert not heavy & set(sys.modules), heavy & set(sys.modules)
for name in ("run", "compare", "evaluate", "predict", "resume", "digest", "ls", "show"):
    call(name)
call("data", "check")
if "deploy" in entries():
    call("deploy", "init")
heavy = {"torch", "numpy", "sklearn", "matplotlib", "torchvision", "safetensors", "flwr", "cryptography"} & set(sys.modules)
assert not heavy, heavy
"""
    environment = {**os.environ, "PYTHONPATH": str(SOURCE), "COLUMNS": "200"}
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment, check=False)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("Example") == 9 + ("deploy" in entries())
    assert "Data set name, image folder root/<domain>/<class>/*, or table of images" in ended.stdout


def test_a_command_whose_package_is_missing_is_not_listed_and_names_the_extra(
    polyfed: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("polyfed.cli.commands.find_spec", lambda name: None)
    assert list(entries())[-1] == "audit" and not re.search("│ (serve|join|nodes|deploy) ", polyfed("--help").out)
    for words in (["serve", "demo"], ["nodes", "list"], ["deploy", "--help"]):
        says(polyfed(*words), f"polyfed {words[0]} needs flwr. Install it with: pip install 'polyfed[flower]'")
    says(polyfed("serv"), "Unknown command 'serv'.")


def test_the_group_knows_commands_by_name() -> None:
    assert app.list_commands(None)[:2] == ["run", "compare"]
    assert app.get_command(None, "nothing") is None


def test_a_package_whose_commands_cannot_be_imported_is_skipped(polyfed: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    def load() -> None:
        raise ImportError("no module named broken")

    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: [SimpleNamespace(value="other.commands", load=load)])
    commands.cache_clear()
    try:
        shown = polyfed("--help")
        assert shown.code == 0 and "compare" in shown.out
        assert shown.err == "Skipping the commands of other.commands: no module named broken\n"
    finally:
        commands.cache_clear()
