"""The page of a reproduced experiment in Markdown and HTML: published and reproduced tables, figures, command, digests and versions."""

from __future__ import annotations

import shlex
import string
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from markupsafe import Markup, escape

from polyfed.papers.claims import judged_orders
from polyfed.papers.figures import STYLE, Picture, pictures
from polyfed.papers.files import UNITS, PaperItem, Part
from polyfed.papers.grid import NOT_ASKED, Form
from polyfed.papers.reproduction import Outcome, Reproduction
from polyfed.runs.folder.atomic_write import write_atomically

LEGEND = (
    "Each cell: published / ours (ours minus published), then marks for differences from the paper. n/a: not available as a number."
)
_HTML_STYLE = (
    "body{max-width:70rem;margin:2rem auto;padding:0 1rem;font:16px/1.5 system-ui,sans-serif;color:#1c2024;background:#fff}"
    "table{border-collapse:collapse;font-size:.9rem}th,td{padding:.3rem .6rem;border-bottom:1px solid #dde1e6;text-align:left}"
    "figure{display:inline-block;width:22rem;max-width:100%;margin:.5rem 1rem .5rem 0}figure.png{width:auto;display:block}img,svg{max-width:100%}pre{overflow-x:auto}p{overflow-wrap:anywhere}pre,code{font-size:.86rem}.scroll{overflow-x:auto}.swatch{vertical-align:middle}"
)


class Footnotes:
    """Assigns a mark to every footnote text."""

    def __init__(self) -> None:
        self.marks: dict[str, str] = {}

    def mark(self, texts: Sequence[str]) -> str:
        """Return the marks of texts: a, b, ..., z, aa, ab, ..."""
        return ",".join(self.marks.setdefault(text, letters(len(self.marks))) for text in texts)

    def lines(self) -> list[str]:
        return [f"{mark}) {text}." for text, mark in self.marks.items()]


def letters(number: int) -> str:
    """Convert a number to letters.

    >>> letters(0), letters(25), letters(26)
    ('a', 'z', 'aa')
    """
    first, last = divmod(number, 26)
    return ("" if first == 0 else letters(first - 1)) + string.ascii_lowercase[last]


@dataclass
class ShownTable:
    """The table of one part: header and lines of cells."""

    name: str
    head: list[str]
    lines: list[list[str]] = field(default_factory=list)


def shown_tables(found: Reproduction, footnotes: Footnotes) -> list[ShownTable]:
    """Return a table for each part with selected cells: published number, ours and the difference."""
    tables = []
    for part, outcomes in found.parts():
        if any(one.state != NOT_ASKED and one.cell.published.exists for one in outcomes):
            tables.append(shown_table(part, outcomes, footnotes))
    return tables


def shown_table(part: Part, outcomes: Sequence[Outcome], footnotes: Footnotes) -> ShownTable:
    table = ShownTable(part.name, ["method", *(column.name for column in part.columns)])
    width = len(part.columns)
    for number, row in enumerate(part.rows):
        cells = outcomes[number * width : (number + 1) * width]
        table.lines.append([row.name, *(_format_cell(one, footnotes) for one in cells)])
    return table


def _format_cell(one: Outcome, footnotes: Footnotes) -> str:
    if not one.cell.published.exists:
        return "–"
    marks = footnotes.mark(one.notes)
    difference = one.difference
    digits = UNITS[one.cell.part.unit][1]
    text = f"{one.cell.published} / {one.words()}" + ("" if difference is None else f" ({difference:+.{digits}f})")
    return f"{text} {marks}" if marks else text


def _command_of(item: PaperItem, form: Form) -> str:
    words = ["polyfed", "reproduce", item.name, *([] if form.is_full else ["--form", form.name])]
    words += [word for name in form.only for word in ("--only", name)]
    words += [word for name in form.columns for word in ("--column", name)]
    words += ["--seeds", str(form.seeds)] if form.seeds is not None else []
    words += [word for name, value in form.changes.items() if name != "root" for word in ("--set", f"{name}={value}")]
    return shlex.join(words) + " --root DATA"


def write_page(found: Reproduction) -> Path:
    """Write both pages and the figures, and return the Markdown file."""
    page = found.page
    page.parent.mkdir(parents=True, exist_ok=True)
    files = {f"{page.stem}-{number}{one.suffix}": one for number, one in enumerate(pictures(found), 1)}
    for name, one in files.items():
        write_atomically(page.parent / name, one.file)
    blocks = list(_blocks(found, files))
    write_atomically(page, ("\n\n".join(_markdown(kind, content) for kind, content in blocks) + "\n").encode())
    write_atomically(page.with_suffix(".html"), _html(blocks).encode())
    return page


def sentences(found: Reproduction) -> list[str]:
    """Return the paragraphs before the tables."""
    item = found.item
    form = (
        "Full form: the paper's setting, except for the marked differences."
        if found.form.is_full
        else f"{found.form.name.capitalize()} form: this is not the paper's setting."
    )
    return [form, f"Published claim: {item.claim}", f"Measured: {item.measure}", *([item.note] if item.note else [])]


def verdicts(found: Reproduction) -> list[str]:
    return [str(one) for one in judged_orders(found)]


def problem_sentences(found: Reproduction) -> list[str]:
    """Return one message per problem, with all runs that it prevented and with DATA as the data folder."""
    runs: dict[str, list[str]] = {}
    root = str(found.form.changes.get("root") or "DATA")
    for name, problem in found.problems.items():
        runs.setdefault(problem.replace(root, "DATA"), []).append(name)
    return [f"{', '.join(names)}: {problem}" for problem, names in runs.items()]


def analysis_sentences(found: Reproduction) -> list[str]:
    """Return the findings of the analyses, and the runs to which they do not apply."""
    texts = []
    for name, one in found.analyses.items():
        start = f"{name}: " if name else ""
        texts += [f"{start}{one.found.title}. {one.found.sentence}"] if one.found is not None else []
        texts += [f"{start}{reason}" for reason in one.skipped]
    return texts


_Block = tuple[str, Any]
"""A kind (title, heading, paragraph, table, items, picture or command) and its content."""


def _blocks(found: Reproduction, files: dict[str, Picture]) -> Iterator[_Block]:
    item, footnotes = found.item, Footnotes()
    yield "title", f"{item.paper}, {item.item}: {item.title}"
    for paragraph in [*sentences(found), LEGEND]:
        yield "paragraph", paragraph
    for table in shown_tables(found, footnotes):
        if table.name:
            yield "heading", table.name
        yield "table", (table.head, table.lines)
    for paragraph in [*footnotes.lines(), *analysis_sentences(found)]:
        yield "paragraph", paragraph
    if item.orders:
        yield "heading", "Rankings in the claim"
        yield "items", verdicts(found)
    for name, one in files.items():
        yield "picture", (name, one)
    yield "heading", "Command, runs, versions"
    yield "command", _command_of(item, found.form)
    yield "table", (["run", "seed", "digest", "made with"], _runs(found))
    if problems := problem_sentences(found):
        yield "items", problems


def _runs(found: Reproduction) -> list[list[str]]:
    rows: list[list[str]] = []
    for name, runs in found.trained.items():
        for one in runs:
            made = ", ".join(f"{key} {value}" for key, value in one.made_with.items() if isinstance(value, str))
            rows.append(
                [f"{found.runs[name].words} (`{found.runs[name].settings.method}`)", str(one.seed), f"`{one.digest[:16]}`", made]
            )
    return rows


def _markdown(kind: str, content: Any) -> str:
    if kind == "table":
        head, lines = content
        return "\n".join([_markdown_line(head), "|" + "---|" * len(head), *map(_markdown_line, lines)])
    if kind == "items":
        return "\n".join(f"* {each}" for each in content)
    if kind == "picture":
        name, one = content
        return f"![{one.title}]({name})"
    return {"title": "# {}", "heading": "## {}", "paragraph": "{}", "command": "`{}`"}[kind].format(content)


def _markdown_line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _html(blocks: Sequence[_Block]) -> str:
    policy = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
    title, body = blocks[0][1], Markup("").join(_html_block(kind, content) for kind, content in blocks)
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width"><meta http-equiv="Content-Security-Policy" content="{policy}">'
        f"<title>{escape(title)}</title><style>{_HTML_STYLE}{STYLE}</style></head><body>{body}</body></html>\n"
    )


def _html_block(kind: str, content: Any) -> Markup:
    if kind == "table":
        head, lines = content
        plain = [[cell.replace("`", "") for cell in line] for line in lines]
        rows = [_html_row(head, "th"), *(_html_row(line, "td") for line in plain)]
        return Markup('<div class="scroll"><table>{}</table></div>').format(Markup("").join(rows))
    if kind == "items":
        return Markup("").join(Markup("<p>{}</p>").format(each) for each in content)
    if kind == "picture":
        _, one = content
        legend = Markup("").join(Markup("<div>{} {}</div>").format(sample, name) for name, sample in one.legend)
        return Markup('<figure class="{}"><figcaption>{}</figcaption>{}{}</figure>').format(
            one.suffix.strip("."), one.title, one.html, legend
        )
    tag = {"title": "h1", "heading": "h2", "paragraph": "p", "command": "pre"}[kind]
    return Markup(f"<{tag}>{{}}</{tag}>").format(content)


def _html_row(cells: Sequence[str], tag: str) -> Markup:
    return Markup("<tr>{}</tr>").format(Markup("").join(Markup(f"<{tag}>{{}}</{tag}>").format(cell) for cell in cells))
