"""The documentation: generated tables are up to date, pages are whole, links lead somewhere, and what is shown can be run."""

from __future__ import annotations

import ast
import dataclasses
import functools
import itertools
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import method_tables
import pytest

from helpers.paths import DOCS, EXAMPLES, ROOT, SOURCE
from helpers.scripts import loaded
from polyfed.cli.commands import commands, imported
from polyfed.cli.completion import NAMES
from polyfed.cli.main import app
from polyfed.core.method import Method, load_file, methods
from polyfed.studies.compare.candidates import candidates
from polyfed.trust import NOTHING, code_in

PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
HEADINGS = ("When to use it", "Formula", "Options", "What travels", "Differences from the paper", "Results", "Reference")
DESIGN = DOCS / "design.md"
WITH_ARGUMENTS = {"classify_with_onnx.py"}
"""Examples that take files; tests of their own run them (tests/runs/test_export.py)."""
SCRIPTS = sorted(file for file in EXAMPLES.glob("*.py") if file.name not in WITH_ARGUMENTS)
OWN_METHOD = EXAMPLES / "own_method.py"
SHELLS = ("sh", "console", "bash")

FENCE = re.compile(r"^```(?P<language>\w*)[^\n]*\n(?P<body>.*?)^```\s*$", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"(?<!!)\[[^\]]*\]\((?P<target>[^)\s]+)\)")


def named(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def code_blocks(page: Path, *languages: str) -> list[str]:
    return [match["body"] for match in FENCE.finditer(page.read_text(encoding="utf-8")) if match["language"] in languages]


@functools.cache
def generator() -> ModuleType:
    return loaded(ROOT / "docs" / "generate.py")


# ------------------------------------------------------------------------------------------------------ generated blocks
def test_generated_blocks_are_up_to_date() -> None:
    stale = [named(page) for page in generator().outdated(PAGES)]
    assert not stale, f"run: python docs/generate.py (out of date: {', '.join(stale)})"


def test_names_for_shell_completion_are_up_to_date() -> None:
    assert NAMES.read_text(encoding="utf-8") == generator().completed_names(), "run: python docs/generate.py"


def test_a_changed_block_is_seen_and_mended() -> None:
    page = DOCS / "settings.md"
    text = page.read_text(encoding="utf-8")
    broken = text.replace("| `rounds` |", "| `rouns` |")
    assert broken != text
    assert generator().rewritten(page, broken) == text


def test_an_unknown_block_is_refused() -> None:
    with pytest.raises(SystemExit, match="no generated block 'tabel'"):
        generator().rewritten(ROOT / "README.md", "<!-- generated: tabel -->\n<!-- end -->")


# ---------------------------------------------------------------------------------------------------- design and glossary
def section(page: Path, heading: str) -> str:
    text = page.read_text(encoding="utf-8")
    start = text.index(f"\n## {heading}\n")
    return text[start : text.find("\n## ", start + 1)]


def test_every_module_says_what_it_holds() -> None:
    package = ROOT / "src" / "polyfed"
    bare = [
        file for file in package.rglob("*.py") if len(ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or "") < 10
    ]
    assert not bare


def test_every_package_is_in_the_tree() -> None:
    package = ROOT / "src" / "polyfed"
    tree = re.findall(r"^ +(\w+)/ ", section(DESIGN, "The packages"), re.MULTILINE)
    assert sorted(tree) == sorted(file.parent.name for file in package.glob("*/**/__init__.py"))


def test_every_layer_is_in_the_picture() -> None:
    package = ROOT / "src" / "polyfed"
    there = {path.stem for path in package.iterdir() if path.suffix == ".py" or (path / "__init__.py").is_file()} - {"__init__"}
    picture = FENCE.search(section(DESIGN, "The layers"))
    assert picture is not None
    named_there = set(re.findall(r"\w+", " ".join(line[:34] for line in picture["body"].splitlines())))
    assert there == named_there - {"py"}


def test_files_that_the_design_names_exist() -> None:
    package = ROOT / "src" / "polyfed"
    text = DESIGN.read_text(encoding="utf-8")
    named_there = set(
        re.findall(r"\b((?:src/polyfed|core|data|methods|backends|runs|studies|papers|cli)/[\w/]+\.(?:py|html\.j2))", text)
    )
    gone = [name for name in named_there if not (package / name.removeprefix("src/polyfed/")).is_file()]
    assert not gone and len(named_there) > 20


def test_the_table_of_slots_has_every_field_of_a_method() -> None:
    rows = cells(section(DESIGN, "The slots"))
    fields = {item.name for item in dataclasses.fields(Method)}
    about_itself = {"name", "facts", "standalone", "is_base", "options", "always_written", "joined_from"}
    assert {name.strip("`") for name in rows} == fields - about_itself
    assert rows["`objective`"][:3] == ["client", "step → scalar, added to the task loss", "summed"]


def test_words_of_our_own_are_defined_once() -> None:
    defined = re.findall(r"^\| \*\*([^*]+)\*\* \|", (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert len(defined) == len(set(defined))
    assert {"entry", "plan", "slot", "request", "reply", "newcomer"} <= set(defined)


def prose(page: Path) -> Iterator[tuple[int, str]]:
    """Lines with their numbers, without code and tables."""
    fenced = False
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), start=1):
        if line.lstrip().startswith("```"):
            fenced = not fenced
        elif not fenced and not line.startswith(("|", "    ")) and not line.lstrip().startswith("<!--"):
            yield number, line


GENERATED = "Generated by `python docs/results/publish.py`"
WRITTEN_BY_HAND = [page for page in PAGES if GENERATED not in page.read_text(encoding="utf-8")]


def cells(table: str) -> dict[str, list[str]]:
    """Rows of a Markdown table by their first cell."""
    rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in table.splitlines() if line.startswith("|")]
    return {row[0]: row[1:] for row in rows[2:]}


def test_table_of_methods_says_what_methods_do() -> None:
    rows = cells(method_tables.methods_table(lambda name: name))
    assert list(rows) == [f"[{name}]({name})" for name in method_tables.own_methods()]
    assert rows["[fedbn](fedbn)"][1:] == ["yes", "yes", "model's", "state ages", "nothing", "1"]
    assert rows["[group_norm](group_norm)"][1:] == ["yes", "no", "1", "yes", "nothing", "1"]
    assert rows["[central](central)"][5] == "all training data, pooled in one place (per sample)"


# What the papers print, read from them: FedWon Table 7 (its "has no BN" of FedAvg is that of the model it ran), gPerXAN Table 1, hFedF Table 1.
def test_fedwons_table_agrees_with_the_paper() -> None:
    found = {name: (row[1], row[2][:3].strip(":")) for name, row in cells(method_tables.fedwon_table_7()).items()}
    printed = {
        "FedAvg": ("as the model", "yes"),
        "FedAvg+GN": ("yes", "yes"),
        "FedAvg+LN": ("yes", "yes"),
        "FixBN": ("no", "yes"),
        "SiloBN": ("no", "no"),
        "FedBN": ("no", "no"),
        "FedWon": ("yes", "yes"),
    }
    assert found == {name: printed[name] for name in found}
    assert {"FedAvg", "FedAvg+GN", "FedAvg+LN", "SiloBN", "FedBN"} <= set(found)


def test_hfedfs_and_gperxans_tables_agree_with_the_papers() -> None:
    found = cells(method_tables.hfedf_table_1())
    assert found["pFedHN"][1:] == ["no", "yes"]
    assert found["hFedF"][1:] == ["yes", "yes"]
    assert cells(method_tables.gperxan_table_1())["gPerXAN"][1:3] == ["no", "no"]


def test_a_bar_in_a_cell_does_not_end_it() -> None:
    assert method_tables.table(("a", "b"), [("x|y", "z")]).splitlines()[-1] == "| x\\|y | z |"


# ----------------------------------------------------------------------------------------------------------------- pages
@pytest.mark.parametrize("name", method_tables.own_methods())
def test_every_method_has_a_whole_page(name: str) -> None:
    page = DOCS / "methods" / f"{name}.md"
    assert page.is_file(), f"the method {name} has no page {named(page)}"
    found = re.findall(r"^## (.+?)\s*$", page.read_text(encoding="utf-8"), re.MULTILINE)
    missing = [heading for heading in HEADINGS if heading not in found]
    assert not missing, f"{named(page)} lacks the headings: {', '.join(missing)}"


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_relative_links_lead_somewhere(page: Path) -> None:
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    targets = [match["target"].partition("#")[0] for match in LINK.finditer(text)]
    local = [target for target in targets if target and not re.match(r"[a-z]+:", target)]
    gone = [target for target in local if not (page.parent / target).exists()]
    assert not gone, f"{named(page)} links to what is not there: {', '.join(gone)}"


# ------------------------------------------------------------------------------------------------------ what can be run
def run_python(file: Path, folder: Path) -> None:
    settings = {"PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "error::UserWarning:polyfed"}
    done = subprocess.run(
        [sys.executable, str(file)],
        cwd=folder,
        env={**os.environ, **settings},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, f"{file.name} failed:\n{done.stdout}\n{done.stderr}"


@pytest.mark.parametrize("example", SCRIPTS, ids=named)
def test_examples_run(example: Path, tmp_path: Path) -> None:
    run_python(example, tmp_path)
    assert not list(tmp_path.iterdir()), f"{named(example)} left files behind"


def shown_python() -> Iterator[tuple[str, str]]:
    """Python blocks of README.md and docs/own-method.md; the method file itself is run as an example."""
    for page in (ROOT / "README.md", DOCS / "own-method.md"):
        for number, block in enumerate(code_blocks(page, "python"), start=1):
            if block != OWN_METHOD.read_text(encoding="utf-8"):
                yield f"{named(page)} block {number}", block


@pytest.mark.parametrize("block", [pytest.param(block, id=name) for name, block in shown_python()])
def test_python_blocks_run(block: str, tmp_path: Path) -> None:
    file = tmp_path / "block.py"
    file.write_text(block, encoding="utf-8")
    run_python(file, tmp_path)


def test_the_method_file_is_shown_as_it_is() -> None:
    page = DOCS / "own-method.md"
    assert OWN_METHOD.read_text(encoding="utf-8") in code_blocks(page, "python"), f"{named(page)} does not show {named(OWN_METHOD)}"


def test_the_method_file_is_short() -> None:
    code = [line for line in OWN_METHOD.read_text(encoding="utf-8").splitlines() if line.strip()]
    assert len(code) <= 22


# -------------------------------------------------------------------------------------------------------------- commands
def commands_of(page: Path) -> list[str]:
    """Lines that call polyfed, in fenced and in indented code."""
    text = page.read_text(encoding="utf-8")
    indented = re.findall(r"^ {4}(polyfed (?:.*\\\n)*.*)", FENCE.sub("", text), re.MULTILINE)
    lines = "\n".join([*code_blocks(page, *SHELLS), *indented]).replace("\\\n", " ").splitlines()
    return [line.strip().removeprefix("$ ") for line in lines if re.match(r"\s*(\$ )?polyfed(\s|$)", line)]


def parsed(line: str) -> dict[str, Any]:
    """The parameters that a command line would give its command; nothing is run."""
    words = list(itertools.takewhile(lambda word: word != ">", shlex.split(line, comments=True)))[1:]
    command, path = app, ["polyfed"]
    while words and hasattr(command, "list_commands"):
        known = {entry.name: entry for group in commands().values() for entry in group} if command is app else {}
        found = imported(known[words[0]]) if words[0] in known else command.get_command(None, words[0])
        assert words[0].startswith("-") or found is not None, f"there is no command {words[0]!r} in: {line}"
        if words[0].startswith("-"):
            break
        path.append(words[0])
        command = found
        words.pop(0)
    values: dict[str, Any] = command.make_context(" ".join(path), words).params
    return values


def test_the_command_check_can_fail() -> None:
    assert parsed('polyfed run digits-mini --method "fedbn + agc" --rounds 3  # note')["rounds"] == 3
    with pytest.raises(AssertionError, match="no command 'rum'"):
        parsed("polyfed rum digits-mini")
    for wrong in ("polyfed run digits-mini --round-about 3", "polyfed run digits-mini --rounds many", "polyfed data check"):
        with pytest.raises(Exception, match=r"No such option|valid integer|Missing"):
            parsed(wrong)


@pytest.mark.parametrize("page", [page for page in PAGES if commands_of(page)], ids=named)
def test_shown_commands_exist(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(methods, "_records", {name: methods.find(name) for name in methods.names()})
    for line in commands_of(page):
        values = parsed(line)
        named_files = [ROOT / file for file in values.get("load") or ()]
        if not all(file.is_file() for file in named_files):
            continue  # the reader writes it; test_tutorials.py runs such commands
        for file in named_files:
            load_file(file, NOTHING.adding(code_in([str(file)])))
        for text in [values.get("method"), values.get("methods")]:
            if text:
                candidates(text)


def test_commands_are_found_wherever_they_stand(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "```console\n$ polyfed ls data\n```\n\n    polyfed show fedbn \\\n        --model resnet20\n\n```text\npolyfed no\n```\n"
    )
    assert [shlex.split(line) for line in commands_of(page)] == [
        ["polyfed", "ls", "data"],
        ["polyfed", "show", "fedbn", "--model", "resnet20"],
    ]


# --------------------------------------------------------------------------------------------------------------- gallery
def test_the_gallery_shows_every_analysis_in_small_pictures() -> None:
    from polyfed.studies.analyse.kinds import KINDS

    text = (DOCS / "gallery.md").read_text(encoding="utf-8")
    shown = re.findall(r"!\[[^\]]+\]\((gallery/[\w-]+\.png)\)", text)
    assert {kind for kind in KINDS if not any(name.startswith(f"gallery/{kind}-") for name in shown)} == set()
    assert all(f"\n## {known.title}\n" in text for known in KINDS.values())
    assert sorted(shown) == sorted(f"gallery/{path.name}" for path in (DOCS / "gallery").iterdir())
    assert all((DOCS / name).stat().st_size < 100_000 for name in shown)


def test_the_page_of_analyses_has_every_kind() -> None:
    from polyfed.studies.analyse.kinds import KINDS

    rows = cells((DOCS / "analyses.md").read_text(encoding="utf-8"))
    assert list(rows) == [f"`{kind}`" for kind in KINDS]
    assert {kind: row[-1].startswith("yes") for kind, row in zip(KINDS, rows.values(), strict=True)} == {
        kind: known.needs_data for kind, known in KINDS.items()
    }
