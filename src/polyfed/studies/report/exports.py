"""Tables and figures for a paper, from run folders: Markdown, CSV, LaTeX or JSON; PNG, SVG or PDF."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from polyfed.core.metrics import MEASURES
from polyfed.errors import RunFolderError, SettingError, nearest
from polyfed.runs.figures import COLOURS, MARKERS, dots_figure, empty_figure
from polyfed.runs.folder.atomic_write import write_atomically
from polyfed.runs.folder.paths import slug
from polyfed.settings import AUTO
from polyfed.studies.report.gather import MEAN, VIEWS, WORST, Group, GroupEntry, average, deviation, gather, run_folders
from polyfed.studies.report.html import headed
from polyfed.studies.report.json_values import json_values
from polyfed.studies.report.pictures import capital, class_names
from polyfed.studies.report.sections import baseline, baseline_cells, mean_bytes
from polyfed.studies.report.verdict import domain_error, mean_error

TABLES = {"md": ".md", "csv": ".csv", "latex": ".tex", "json": ".json"}
FIGURES = {"png": ".png", "svg": ".svg", "pdf": ".pdf"}


def write_tables(runs: Sequence[str | Path], out: str | Path | None, form: str, metric: str = AUTO) -> Path:
    """Write the tables of scores and costs in one file.

    Args:
        runs: run folders, or folders that hold run folders.
        out: the file, or a folder for a file called ``tables``; default: ``tables`` in the working folder.
        form: md, csv, latex or json.
        metric: the measure that heads the tables.
    """
    if form not in TABLES:
        raise SettingError(f"--tables cannot be {form!r}. {nearest(form, TABLES)}")
    path = target(out, f"tables{TABLES[form]}", TABLES[form], f"--tables {form}")
    groups = [headed(group, metric) for group in gather(run_folders(runs))]
    write_file(path, {"md": markdown, "csv": as_csv, "latex": latex, "json": as_json}[form](groups).encode())
    return path


def write_figures(runs: Sequence[str | Path], out: str | Path | None, form: str, metric: str = AUTO) -> list[Path]:
    """Write figures: scores by domain, curves over rounds, and confusion matrices.

    Args:
        runs: run folders, or folders that hold run folders.
        out: a folder for all of them (default: ``figures``), or a file for the scores of one comparison.
        form: png, svg or pdf.
        metric: the measure that is drawn.
    """
    if form not in FIGURES:
        raise SettingError(f"--figures cannot be {form!r}. {nearest(form, FIGURES)}")
    groups = [headed(group, metric) for group in gather(run_folders(runs))]
    if out is not None and Path(out).suffix:
        path = target(out, "", FIGURES[form], f"--figures {form}")
        group, view = next(((g, v) for g in groups for v in reversed(VIEWS) if g.domains(v)), (None, ""))
        if group is None:
            raise RunFolderError("Nothing was scored yet, so there is nothing to draw.")
        save_figure(path, score_figure(group, view))
        return [path]
    folder, written = Path("figures" if out is None else out), list[Path]()
    for group in groups:
        for view in (view for view in VIEWS if group.domains(view)):
            name = f"{slug(group.name)}-{view}"
            made = {"scores": score_figure(group, view), "curves": curve_figure(group, view), "confusion": map_figure(group, view)}
            for what, figure in made.items():
                if figure is not None:
                    written.append(folder / f"{name}-{what}{FIGURES[form]}")
                    save_figure(written[-1], figure)
    return written


def target(out: str | Path | None, name: str, suffix: str, option: str) -> Path:
    """The file to write: ``out`` itself, or a file of this name in it where it is a folder."""
    if out is None:
        return Path(name)
    path = Path(out)
    if path.is_dir() or not path.suffix:
        return path / name
    if path.suffix != suffix:
        raise SettingError(
            f"{option} writes {suffix} files, and -o names {path.name}. Call it {path.stem}{suffix}, or name a folder."
        )
    return path


def write_file(path: Path, content: bytes) -> None:
    """Write a file, and its folder where it is missing."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, content)
    except OSError as error:
        raise RunFolderError(f"Cannot write to {path}: {error.strerror or error}. Choose another -o.") from error


# ------------------------------------------------------------------------------------------------------------------- tables


def ranked(group: Group, view: str) -> list[GroupEntry]:
    """The methods by score."""
    return sorted(group.entries, key=lambda entry: -(entry.mean(view, MEAN) if entry.finals(view, MEAN) else -math.inf))


def columns(group: Group, view: str) -> list[tuple[str, Any]]:
    """The columns of a table of scores: domains, then mean and worst."""
    domains = group.domains(view)
    return [*((d, d) for d in domains), *([("mean", MEAN), ("worst", WORST)] if len(domains) > 1 else [])]


def score_rows(group: Group, view: str) -> list[list[tuple[str, str, bool]]]:
    """A row for each method, best first: each cell a value, its deviation over seeds, and whether it is the best of its column."""
    entries = ranked(group, view)
    best = {
        name: max((e.mean(view, key) for e in entries if e.finals(view, key)), default=math.nan)
        for name, key in columns(group, view)
    }
    rows = []
    for entry in entries:
        row = [(entry.label, "", False)]
        for name, key in columns(group, view):
            found = list(entry.finals(view, key).values())
            spread = deviation(found)
            value = average(found)
            top = len(entries) > 1 and bool(found) and value >= best[name] - 1e-12
            row.append((f"{100 * value:.1f}" if found else "-", "" if math.isnan(spread) else f"{100 * spread:.1f}", top))
        rows.append(row)
    return rows


def _title(group: Group, view: str) -> str:
    how = "each domain left out in turn" if group.left_out else f"{view} domains"
    seeds = max(len(entry.seeds) for entry in group.entries)
    meaning = f"; ± is the sample standard deviation over {seeds} seeds" if seeds > 1 else ""
    return f"{capital(MEASURES[group.measure])} in % on {group.name}, {how}{meaning}."


def markdown(groups: Iterable[Group]) -> str:
    """All tables as Markdown."""
    parts = []
    for group in groups:
        for view in (view for view in VIEWS if group.domains(view)):
            names = [name for name, _ in columns(group, view)]
            lines = [f"| {' | '.join(['method', *names])} |".replace("|  |", "|"), f"|---|{'---:|' * len(names)}"]
            for row in score_rows(group, view):
                cells = [f"**{text}**" if top else text for text, _, top in row]
                spreads = [f" ± {spread}" if spread else "" for _, spread, _ in row]
                lines.append(f"| {' | '.join(_md(c) + s for c, s in zip(cells, spreads, strict=True))} |")
            base = baseline_cells(group, view)[: len(names)]
            if base:
                lines.append(f"| {' | '.join(['*most frequent class*', *base])} |")
            parts.append(f"{_title(group, view)}\n\n" + "\n".join(lines))
    return "\n\n".join(parts) + "\n"


def _md(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def latex(groups: Iterable[Group]) -> str:
    """All tables as LaTeX, with booktabs."""
    parts = ["% needs \\usepackage{booktabs}"]
    for group in groups:
        for view in (view for view in VIEWS if group.domains(view)):
            names = [name for name, _ in columns(group, view)]
            lines = [
                f"\\begin{{tabular}}{{l{'r' * len(names)}}}",
                "\\toprule",
                f"{' & '.join(map(_tex, ['method', *names]))} \\\\",
                "\\midrule",
            ]
            for row in score_rows(group, view):
                cells = [f"\\textbf{{{_tex(text)}}}" if top else _tex(text) for text, _, top in row]
                spreads = [f" {{\\footnotesize$\\pm${spread}}}" if spread else "" for _, spread, _ in row]
                lines.append(" & ".join(c + s for c, s in zip(cells, spreads, strict=True)) + " \\\\")
            base = baseline_cells(group, view)[: len(names)]
            if base:
                lines += ["\\midrule", " & ".join(["most frequent class", *base]) + " \\\\"]
            caption = _tex(_title(group, view)).replace("±", "$\\pm$")
            body = "\n".join([*lines, "\\bottomrule", "\\end{tabular}"])
            parts.append(f"\\begin{{table}}\n\\centering\n\\caption{{{caption}}}\n{body}\n\\end{{table}}")
    return "\n\n".join(parts) + "\n"


def _tex(text: str) -> str:
    special = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
    return "".join(special.get(char, f"\\{char}" if char in "&%$#_{}" else char) for char in text.replace("−", "-"))


def records(groups: Iterable[Group]) -> list[dict[str, Any]]:
    """Every score of every method, measure, domain and seed, one flat mapping each."""
    found = []
    for group in groups:
        for measure in group.task.measures:
            for entry in group.by(measure).entries:
                for view in VIEWS:
                    for name, key in columns(group, view) if group.domains(view) else ():
                        for seed, value in entry.finals(view, key).items():
                            size = group.test_size(view, key) if isinstance(key, str) else None
                            found.append(
                                {
                                    "data": group.name,
                                    "method": entry.label,
                                    "seed": seed,
                                    "view": view,
                                    "domain": name,
                                    "over_domains": not isinstance(key, str),
                                    "measure": measure,
                                    "value": value,
                                    "test_images": size,
                                }
                            )
    return found


def as_csv(groups: Iterable[Group]) -> str:
    """Every score as a line of CSV."""
    return csv_of(records(groups))


def csv_of(rows: Sequence[Mapping[str, Any]]) -> str:
    """Flat mappings as CSV."""
    file = io.StringIO()
    writer = csv.DictWriter(file, list(rows[0]) if rows else ["empty"], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return file.getvalue()


def as_json(groups: Iterable[Group]) -> str:
    """Scores and costs as JSON."""
    listed = list(groups)
    costs = [
        {
            "data": group.name,
            "method": entry.label,
            "training_bytes_up": sum(mean_bytes(entry, "up", "training").values()),
            "training_bytes_down": sum(mean_bytes(entry, "down", "training").values()),
            "training_seconds": average(run.costs.get("seconds", {}).get("training", 0.0) for run in entry.counted),
        }
        for group in listed
        for entry in group.entries
    ]
    metrics = {group.name: group.measure for group in listed}
    return (
        json.dumps(json_values({"metric": metrics, "scores": records(listed), "costs": costs}), indent=1, ensure_ascii=False) + "\n"
    )


# ------------------------------------------------------------------------------------------------------------------ figures


def save_figure(path: Path, figure: Any, dots_per_inch: int = 200) -> None:
    """Write a figure in the form that the file is called after."""
    file = io.BytesIO()
    figure.savefig(
        file,
        format=path.suffix[1:],
        dpi=dots_per_inch,
        metadata={} if path.suffix == ".png" else {"Date": None} if path.suffix == ".svg" else {"CreationDate": None},
    )
    write_file(path, file.getvalue())


def score_figure(group: Group, view: str) -> Any:
    """A dot for each method and domain; whiskers are the deviation over seeds, else the error from the size of the test."""
    named = columns(group, view)
    rows = [(entry.label, [_dot(group, view, key, entry) for _, key in named]) for entry in ranked(group, view)]
    return dots_figure([name for name, _ in named], rows, MEASURES[group.measure], baseline(group, view)[: len(named)])


def _dot(group: Group, view: str, key: Any, entry: GroupEntry) -> tuple[float, float] | None:
    found = list(entry.finals(view, key).values())
    if not found:
        return None
    of_test = mean_error(group, view, entry) if key == MEAN else math.nan if key == WORST else domain_error(group, view, key, entry)
    return average(found), deviation(found) if len(found) > 1 else of_test


def curve_figure(group: Group, view: str) -> Any | None:
    """The mean over domains by round, with a band of one deviation over seeds; None where one round was scored."""
    if all(len(entry.rounds(view)) < 2 for entry in group.entries):
        return None
    from matplotlib.ticker import MaxNLocator

    figure = empty_figure(4.2, 3.0)
    axes = figure.add_subplot()
    for place, entry in enumerate(ranked(group, view)):
        rounds = [number for number in entry.rounds(view) if entry.scores(view, MEAN, number)]
        values = [list(entry.scores(view, MEAN, number).values()) for number in rounds]
        middle = [100 * average(one) for one in values]
        colour = COLOURS[place % len(COLOURS)]
        axes.plot(
            rounds, middle, color=colour, marker=MARKERS[place % len(MARKERS)], markersize=3, linewidth=1.2, label=entry.label
        )
        wide = [100 * deviation(one) for one in values]
        if wide and not any(map(math.isnan, wide)):
            low, high = ([m + sign * w for m, w in zip(middle, wide, strict=True)] for sign in (-1, 1))
            axes.fill_between(rounds, low, high, color=colour, alpha=0.15, linewidth=0)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axes.set_xlabel("round")
    axes.set_ylabel(f"mean {MEASURES[group.measure]}, %")
    axes.grid(linewidth=0.4)
    axes.legend(fontsize=7)
    return figure


def map_figure(group: Group, view: str) -> Any | None:
    """The confusion matrices of the best method, one for each domain; None where none was kept."""
    best = ranked(group, view)[0]
    found = {}
    for domain in group.domains(view):
        known = [m for run in best.counted if (m := run.domains.get((view, domain), {}).get("confusion"))]
        if known:
            found[domain] = [[sum(m[i][j] for m in known) for j in range(len(known[0]))] for i in range(len(known[0]))]
    if not found:
        return None
    figure = empty_figure(2.6 * len(found), 2.7)
    for place, (domain, matrix) in enumerate(found.items()):
        axes = figure.add_subplot(1, len(found), place + 1)
        shares = [[value / (sum(row) or 1) for value in row] for row in matrix]
        axes.imshow(shares, cmap="Blues", vmin=0, vmax=1)
        names = class_names(best.first, len(matrix))
        axes.set_title(f"{domain}" if place else f"{best.label}: {domain}", fontsize=8)
        axes.set_xticks(range(len(names)), names, rotation=90, fontsize=6)
        axes.set_yticks(range(len(names)), names if place == 0 else [""] * len(names), fontsize=6)
        axes.set_xlabel("answer", fontsize=7)
        axes.set_ylabel("" if place else "true class", fontsize=7)
    return figure
