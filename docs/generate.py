"""Rewrite the generated blocks of README.md and docs/, and the names for shell completion; --check only compares.

A block lies between the comments "generated: NAME" and "end". NAME is a key of BLOCKS, sometimes followed by one word:
the method whose options are listed, the kind of thing that is listed, or the file that is shown. The README's own method may
stand between "own-method" and "end".
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import inspect
import json
import os
import re
import sys
import textwrap
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import method_tables
from method_tables import table

import polyfed
from polyfed.cli.commands import commands, imported
from polyfed.cli.completion import NAMES
from polyfed.core.slots import SLOTS
from polyfed.settings import FACTS
from polyfed.studies.report.catalogue import GIVEN_BY_RUN, first_sentence, registry_of, written
from polyfed.studies.report.words import EXPERIMENTS, KINDS, RECIPES
from polyfed.text import write_option

ROOT = Path(__file__).resolve().parents[1]
BLOCK = re.compile(
    r"(?P<start><!-- (?:generated: (?P<name>[\w-]+)(?: (?P<about>\S+))?|(?P<bare>own-method)) -->\n).*?(?P<end><!-- end -->)",
    re.DOTALL,
)
PACKAGE = ROOT / "src" / "polyfed"
WIDTH = 115
COMMON = 3
"""Arguments and options of this many commands, with the same help text, are explained once."""
OUTPUT = ("--explain", "--json", "--quiet")
"""Options about what is printed; commands that have all of them refer to them as output options."""
UPWARDS = ("core", "models", "data", "methods", "backends", "runs", "studies", "papers", "flower", "cli")
"""The packages from the lowest layer to the highest, as they are listed; one that is missing here comes last."""


def pages() -> list[Path]:
    """All files that may hold generated blocks."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def settings_table() -> str:
    """Return every setting with its default and meaning."""
    rows = ([f"`{name}`", _default(facts.default), facts.doc] for name, facts in FACTS.items() if name != "data")
    return table(("setting", "default", "meaning"), rows)


def _default(value: Any) -> str:
    return "none" if value is None or value == () else f"`{write_option(value)}`"


def listing(kind: str) -> str:
    """All registered things of a kind, with the options that a text may set."""
    registry = registry_of(kind)
    records = [record for record in map(registry.find, registry.names()) if record.build.__module__.startswith("polyfed.")]
    rows = []
    for record in records:
        free = [p for p in record.signature.parameters.values() if p.name not in GIVEN_BY_RUN[kind]]
        rows.append([f"`{written(kind, record.name)}`", first_sentence(record.doc), ", ".join(map(_option, free)) or "none"])
    return table(("name", "what", "options"), rows)


def _option(parameter: inspect.Parameter) -> str:
    default = "" if parameter.default is parameter.empty else f"={write_option(parameter.default)}"
    return f"`{parameter.name}{default}`"


def shown_file(name: str) -> str:
    """A file as a code block."""
    return f"```python\n{(ROOT / name).read_text(encoding='utf-8').rstrip()}\n```"


def purpose(file: Path) -> str:
    """The first sentence of a module's docstring."""
    paragraph = first_sentence(ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or "")
    return re.split(r"\.\s+(?=[A-Z])", paragraph)[0].replace("``", "`")


def packages() -> dict[str, list[Path]]:
    """Every package below ``polyfed`` with its modules, the root first and then upwards; a package's own file is not among them."""
    homes: dict[str, list[Path]] = {}
    for file in sorted(PACKAGE.rglob("*.py")):
        modules = homes.setdefault(file.parent.relative_to(PACKAGE).as_posix(), [])
        if file.name != "__init__.py":
            modules.append(file)

    def height(home: str) -> tuple[int, str]:
        first = home.split("/")[0]
        return (-1 if home == "." else UPWARDS.index(first) if first in UPWARDS else len(UPWARDS)), home

    return {home: homes[home] for home in sorted(homes, key=height)}


def packages_tree() -> str:
    """Return the packages, each with its purpose, as a tree."""
    rows = []
    for home in packages():
        if home == ".":
            continue
        depth = home.count("/") + 1
        rows.append((f"{'  ' * depth}{home.split('/')[-1]}/", purpose(PACKAGE / home / "__init__.py")))
    width = max(len(name) for name, _ in rows) + 2
    return "\n".join(["```text", "polyfed/", *(f"{name:{width}}{about.replace('`', '')}" for name, about in rows), "```"])


def slots_table() -> str:
    """Every slot as ``core/slots.py`` has it."""
    rows = (
        [
            f"`{slot.name}`",
            slot.side,
            slot.meaning,
            slot.join.value,
            ", ".join(stage or "(unnamed)" for stage in slot.stages),
            "yes" if slot.must_be_used else "",
        ]
        for slot in SLOTS.values()
    )
    return table(("slot", "side", "meaning", "two parts joined", "stages, in order", "named by `uses`"), rows)


def docs_script(name: str) -> Any:
    """A script of docs/ as a module."""
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def linked_from(page: Path) -> method_tables.Link:
    """Addresses of methods' pages, relative to a page."""
    return lambda name: Path(os.path.relpath(ROOT / "docs" / "methods" / f"{name}.md", page.parent)).as_posix()


def commands_reference() -> str:
    """Return every command with its usage, arguments, options and example; shared options are explained once."""
    shown = {
        title: [each for entry in group for each in single_commands(f"polyfed {entry.name}", imported(entry))]
        for title, group in commands().items()
    }
    counts = Counter(option_row(param) for many in shown.values() for _, command in many for param in own_options(command))
    by_name = {row[0]: row for row, count in reversed(counts.most_common()) if count >= COMMON}
    common = set(by_name.values())
    sections = [
        f"## {title}\n\n" + "\n\n".join(command_text(path, command, common) for path, command in many)
        for title, many in shown.items()
    ]
    options = [row for row in counts if row in common]
    settings = ", ".join(f"`--{name.replace('_', '-')}`" for name in FACTS if name != "data")
    return "\n\n".join(
        [
            f"## Common options\n\nOutput options: {', '.join(f'`{name}`' for name in OUTPUT)}.\n\n"
            + table(("option", "meaning"), options),
            "Commands that train also take the [settings](../settings.md) as options:\n\n"
            + textwrap.fill(settings, WIDTH, break_on_hyphens=False),
            *sections,
        ]
    )


def single_commands(path: str, command: Any) -> list[tuple[str, Any]]:
    """Return a command with its name, or all commands of a group."""
    inner = getattr(command, "commands", None)
    if inner is None:
        return [(path, command)]
    return [found for name, each in inner.items() for found in single_commands(f"{path} {name}", each)]


def own_options(command: Any) -> list[Any]:
    """Return a command's parameters without --help and without the settings, which have a page."""
    hidden = {"--help", "--help-all"}
    return [param for param in command.params if not hidden & set(param.opts) and not is_setting(param)]


def is_setting(param: Any) -> bool:
    """Return True if an option sets a setting: it repeats the setting's text, followed by the default."""
    return param.name in FACTS and param.name != "data" and (param.help or "").startswith(FACTS[param.name].doc)


def option_row(param: Any) -> tuple[str, str]:
    """Return a parameter and its help text, for a table."""
    return f"`{written_as(param)}`", (param.help or "").replace("<", "&lt;").replace("*", "\\*")


def command_text(path: str, command: Any, common: set[tuple[str, str]]) -> str:
    """Return the section of one command."""
    own = own_options(command)
    settings = {param.name for param in command.params if is_setting(param)}
    rows = [row for row in map(option_row, own) if row not in common]
    also = [row[0].split(" ")[0].strip("`,") for row in map(option_row, own) if row in common]
    if set(OUTPUT) <= set(also):
        also = [name for name in also if name not in OUTPUT]
        named = [*(f"`{name}`" for name in also), "output options"]
    else:
        named = [f"`{name}`" for name in also]
    notes = f"Common: {', '.join(named)}." if named else ""
    if settings:
        taken, missing = (
            [f"`--{name.replace('_', '-')}`" for name in FACTS if (name in settings) == want] for want in (True, False)
        )
        missing.remove("`--data`")
        if len(taken) < len(missing):
            notes += f" Settings: {', '.join(taken)}."
        else:
            notes += f" All settings{' except ' if missing else ''}{', '.join(missing)}."
    example = (command.epilog or "").partition(":")[2].strip()
    calls = [call.strip() for call in re.split(r"\s+(?=polyfed )", example) if call.strip()]
    shown = [
        f"### {path}",
        textwrap.fill(" ".join((command.help or "").split()), WIDTH),
        table(("option", "meaning"), rows) if rows else "",
        textwrap.fill(notes.strip(), WIDTH, break_on_hyphens=False),
        "```sh\n" + "\n".join(calls) + "\n```" if calls else "",
    ]
    return "\n\n".join(filter(None, shown))


def written_as(param: Any) -> str:
    """A parameter as it is typed."""
    if param.param_type_name == "argument":
        return str(param.metavar or param.name.upper())
    value = "" if param.is_flag else f" {(param.metavar or param.name.upper()).replace('|', '/')}"
    return ", ".join([*param.opts, *param.secondary_opts]) + value


def python_interface() -> str:
    """Every public name, as mkdocstrings is told to show it."""
    homes: dict[str, list[str]] = {}
    for name in polyfed.__all__:
        found = getattr(polyfed, name)
        homes.setdefault("Functions" if found.__module__.startswith("polyfed.api") else "Classes for custom methods", []).append(
            f"::: {found.__module__}.{name}"
        )
    return "\n\n".join(f"## {title}\n\n" + "\n\n".join(sorted(names)) for title, names in sorted(homes.items(), reverse=True))


BLOCKS: dict[str, Callable[[Path, str], str]] = {
    "methods": lambda page, _: method_tables.methods_table(linked_from(page)),
    "options": lambda _, about: method_tables.options_table(about),
    "fedwon-table-7": lambda _, __: method_tables.fedwon_table_7(),
    "hfedf-table-1": lambda _, __: method_tables.hfedf_table_1(),
    "gperxan-table-1": lambda _, __: method_tables.gperxan_table_1(),
    "packages": lambda _, __: packages_tree(),
    "slots": lambda _, __: slots_table(),
    "commands": lambda _, __: commands_reference(),
    "python-interface": lambda _, __: python_interface(),
    "settings": lambda _, __: settings_table(),
    "list": lambda _, about: listing(about),
    "file": lambda _, about: shown_file(about),
    "results-index": lambda _, __: str(docs_script("results_index").index_table()),
    "results-pages": lambda _, __: str(docs_script("results_index").pages_list()),
    "results-summary": lambda _, about: str(docs_script("results_index").summary_table(about)),
    "own-method": lambda _, __: shown_file("examples/own_method.py"),
}


def rewritten(page: Path, text: str) -> str:
    """The text of a page with every generated block written again."""

    def block(match: re.Match[str]) -> str:
        name, about = match["name"] or match["bare"], match["about"] or ""
        if name not in BLOCKS:
            raise SystemExit(f"{page}: there is no generated block {name!r}. There are: {', '.join(BLOCKS)}.")
        return f"{match['start']}{BLOCKS[name](page, about)}\n{match['end']}"

    return BLOCK.sub(block, text)


def completed_names() -> str:
    """The names that shell completion offers, which must not import torch to know them."""
    from polyfed.papers.files import item_names
    from polyfed.studies.compare.recipes import shipped_names

    found = {kind: [written(kind, name) for name in registry_of(kind).names()] for kind in KINDS}
    return json.dumps({**found, RECIPES: shipped_names(), EXPERIMENTS: item_names()}, indent=1) + "\n"


def outdated(files: Iterable[Path]) -> dict[Path, str]:
    """Pages whose generated blocks are not what they should be, with the text they should have."""
    found = {}
    for page in files:
        now = page.read_text(encoding="utf-8")
        wanted = rewritten(page, now)
        if wanted != now:
            found[page] = wanted
    return found


def main() -> int:
    """Rewrite, or compare. The pages of results come first, since other pages list them."""
    parser = argparse.ArgumentParser(description="Rewrite the generated blocks of README.md and docs/.")
    parser.add_argument("--check", action="store_true", help="only say which pages are out of date")
    only_check = parser.parse_args().check
    results = docs_script("results/publish").publish(ROOT / "docs" / "results", only_check)
    found = outdated(page for page in pages() if page.is_file())
    names = completed_names()
    if not NAMES.is_file() or NAMES.read_text(encoding="utf-8") != names:
        found[NAMES] = names
    for page in [*results, *found]:
        print(f"{'out of date' if only_check else 'rewritten'}: {page.relative_to(ROOT)}")
    for page, text in found.items():
        if not only_check:
            page.write_text(text, encoding="utf-8")
    return int(only_check and bool(found or results))


if __name__ == "__main__":
    sys.exit(main())
