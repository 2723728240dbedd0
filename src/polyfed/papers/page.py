"""The page of a reproduced experiment, in Markdown and in HTML: the paper's table with ours, pictures, commands, digests, versions."""

from __future__ import annotations

import shlex
from pathlib import Path

from markupsafe import Markup, escape

from polyfed.papers.claims import judged_orders
from polyfed.papers.figures import STYLE, pictures
from polyfed.papers.files import PaperItem
from polyfed.papers.grid import Form
from polyfed.papers.reproduction import Reproduction
from polyfed.papers.tables import LEGEND, Footnotes, ShownTable, shown_tables
from polyfed.runs.folder.atomic_write import write_atomically

HTML_STYLE = (
    "body{max-width:70rem;margin:2rem auto;padding:0 1rem;font:16px/1.5 system-ui,sans-serif;color:#1c2024;background:#fff}"
    "table{border-collapse:collapse;font-size:.9rem}th,td{padding:.3rem .6rem;border-bottom:1px solid #dde1e6;text-align:left}"
    "figure{display:inline-block;width:22rem;max-width:100%;margin:.5rem 1rem .5rem 0}figure.png{width:auto;display:block}img,svg{max-width:100%}pre{overflow-x:auto}p{overflow-wrap:anywhere}pre,code{font-size:.86rem}.scroll{overflow-x:auto}.swatch{vertical-align:middle}"
)


def command_of(item: PaperItem, form: Form) -> str:
    """The command that makes this page again; the folder of the data is the reader's own."""
    words = ["polyfed", "reproduce", item.name, *([] if form.is_full else ["--form", form.name])]
    words += [word for name in form.only for word in ("--only", name)]
    words += [word for name in form.columns for word in ("--column", name)]
    words += ["--seeds", str(form.seeds)] if form.seeds is not None else []
    words += [word for name, value in form.changes.items() if name != "root" for word in ("--set", f"{name}={value}")]
    return shlex.join(words) + " --root DATA"


def write_page(found: Reproduction) -> Path:
    """Write both pages and the pictures; the Markdown file is returned."""
    page = found.page
    page.parent.mkdir(parents=True, exist_ok=True)
    drawn = {f"{page.stem}-{number}{one.suffix}": one for number, one in enumerate(pictures(found), 1)}
    for name, one in drawn.items():
        write_atomically(page.parent / name, one.file)
    footnotes = Footnotes()
    tables = shown_tables(found, footnotes)
    write_atomically(page, _markdown(found, tables, footnotes, [(name, one.title) for name, one in drawn.items()]).encode())
    charts = [
        Markup('<figure class="{}"><figcaption>{}</figcaption>{}{}</figure>').format(
            one.suffix.strip("."),
            one.title,
            one.html,
            Markup("").join(Markup("<div>{} {}</div>").format(sample, name) for name, sample in one.legend),
        )
        for one in drawn.values()
    ]
    write_atomically(page.with_suffix(".html"), _html(found, tables, footnotes, Markup("").join(charts)).encode())
    return page


def sentences(found: Reproduction) -> list[str]:
    """What is said before the tables."""
    item = found.item
    form = (
        "Full form: the paper's setting, but for what the marks say."
        if found.form.is_full
        else f"{found.form.name.capitalize()} form: this is not the paper's setting."
    )
    return [form, f"Published claim: {item.claim}", f"Measured: {item.measure}", *([item.note] if item.note else [])]


def verdicts(found: Reproduction) -> list[str]:
    """What our runs show of the orders that the claim names."""
    return [str(one) for one in judged_orders(found)]


def problem_sentences(found: Reproduction) -> list[str]:
    """What kept runs from being trained, once for all runs that it is true of; the folder of the data is the reader's own here too."""
    runs: dict[str, list[str]] = {}
    root = str(found.form.changes.get("root") or "DATA")
    for name, problem in found.problems.items():
        runs.setdefault(problem.replace(root, "DATA"), []).append(name)
    return [f"{', '.join(names)}: {problem}" for problem, names in runs.items()]


def analysis_sentences(found: Reproduction) -> list[str]:
    """What the analyses of the runs found, and to which runs they do not apply."""
    told = []
    for name, one in found.analyses.items():
        start = f"{name}: " if name else ""
        told += [f"{start}{one.found.title}. {one.found.sentence}"] if one.found is not None else []
        told += [f"{start}{reason}" for reason in one.skipped]
    return told


def _markdown(found: Reproduction, tables: list[ShownTable], footnotes: Footnotes, drawn: list[tuple[str, str]]) -> str:
    item = found.item
    lines = [f"# {item.paper}, {item.item}: {item.title}", "", *(f"{each}\n" for each in sentences(found)), LEGEND, ""]
    for table in tables:
        lines += [f"## {table.name}", ""] if table.name else []
        lines += [_line(table.head), "|" + "---|" * len(table.head), *(_line(cells) for cells in table.lines), ""]
    lines += [*(f"{each}\n" for each in footnotes.lines())]
    lines += [*(f"{each}\n" for each in analysis_sentences(found))]
    lines += ["## Orders that the claim names", "", *(f"* {each}" for each in verdicts(found)), ""] if item.orders else []
    lines += [line for name, title in drawn for line in (f"![{title}]({name})", "")]
    lines += ["## Command, runs, versions", "", f"`{command_of(item, found.form)}`", ""]
    lines += [_line(("run", "seed", "digest", "made with")), "|---|---|---|---|", *map(_line, _runs(found)), ""]
    lines += [f"* {sentence}" for sentence in problem_sentences(found)]
    return "\n".join(lines).rstrip() + "\n"


def _line(cells: tuple[str, ...] | list[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _runs(found: Reproduction) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for name, runs in found.trained.items():
        for one in runs:
            made = ", ".join(f"{key} {value}" for key, value in one.made_with.items() if isinstance(value, str))
            rows.append(
                (f"{found.runs[name].words} (`{found.runs[name].settings.method}`)", str(one.seed), f"`{one.digest[:16]}`", made)
            )
    return rows


def _html(found: Reproduction, tables: list[ShownTable], footnotes: Footnotes, charts: Markup) -> str:
    item = found.item
    title = f"{item.paper}, {item.item}: {item.title}"
    body = [Markup("<h1>{}</h1>").format(title), *(Markup("<p>{}</p>").format(each) for each in [*sentences(found), LEGEND])]
    for table in tables:
        body.append(Markup("<h2>{}</h2>").format(table.name) if table.name else Markup(""))
        body.append(_html_table(table.head, table.lines))
    body += [Markup("<p>{}</p>").format(each) for each in [*footnotes.lines(), *analysis_sentences(found)]]
    body += (
        [Markup("<h2>Orders that the claim names</h2>"), *(Markup("<p>{}</p>").format(each) for each in verdicts(found))]
        if item.orders
        else []
    )
    body += [charts, Markup("<h2>Command, runs, versions</h2><pre>{}</pre>").format(command_of(item, found.form))]
    body.append(
        _html_table(["run", "seed", "digest", "made with"], [[cell.replace("`", "") for cell in row] for row in _runs(found)])
    )
    body += [Markup("<p>{}</p>").format(sentence) for sentence in problem_sentences(found)]
    policy = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width"><meta http-equiv="Content-Security-Policy" content="{policy}">'
        f"<title>{escape(title)}</title><style>{HTML_STYLE}{STYLE}</style></head><body>{Markup('').join(body)}</body></html>\n"
    )


def _html_table(head: list[str], lines: list[list[str]]) -> Markup:
    def row(cells: list[str], tag: str) -> Markup:
        return Markup("<tr>{}</tr>").format(Markup("").join(Markup(f"<{tag}>{{}}</{tag}>").format(cell) for cell in cells))

    return Markup('<div class="scroll"><table>{}{}</table></div>').format(
        row(head, "th"), Markup("").join(row(line, "td") for line in lines)
    )
