"""Export tables (Markdown, CSV, LaTeX, JSON) and figures (PNG, SVG, PDF) for papers."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from polyfed.errors import RunFolderError, SettingError, nearest
from polyfed.runs.figures import COLOURS, MARKERS, empty_figure
from polyfed.runs.folder.atomic_write import write_atomically
from polyfed.runs.folder.paths import slug
from polyfed.settings import AUTO
from polyfed.studies.analyse.analyse import Analyses
from polyfed.studies.report.gather import gather
from polyfed.studies.report.run_record import MEAN, average, deviation, run_folders
from polyfed.studies.report.run_set import MARK, Cell, RunSet
from polyfed.studies.report.verdict import describe, verdict_of, verdicts_of
from polyfed.studies.report.words import capital, json_values, percent, points
from polyfed.tasks.metrics import MEASURES

TABLES = {"md": ".md", "csv": ".csv", "latex": ".tex", "json": ".json"}
FIGURES = {"png": ".png", "svg": ".svg", "pdf": ".pdf"}
ANALYSES = "analyses.json"
COMPARED = ("compared_with", "verdict")


def write_tables(
    runs: Sequence[str | Path], out: str | Path | None, form: str, metric: str = AUTO, allow_unfinished: bool = False
) -> Path:
    """Write the tables of scores and costs to one file.

    Args:
        runs: Run folders, or folders that contain run folders.
        out: Output file, or a folder for a file called ``tables``. Default: ``tables`` in the working directory.
        form: md, csv, latex or json.
        metric: Primary metric.
        allow_unfinished: Include unfinished runs, labelled with their round, instead of raising an error.
    """
    if form not in TABLES:
        raise SettingError(f"--tables does not support {form!r}. {nearest(form, TABLES)}")
    path = _target(out, f"tables{TABLES[form]}", TABLES[form], f"--tables {form}")
    sets = [found.headed(metric) for found in gather(run_folders(runs), allow_unfinished, allow_unfinished)]
    write = {"md": _markdown, "csv": lambda found: _csv(_compared(found)), "latex": _latex, "json": _json}[form]
    _write_file(path, write(sets).encode())
    return path


def write_figures(
    runs: Sequence[str | Path], out: str | Path | None, form: str, metric: str = AUTO, allow_unfinished: bool = False
) -> list[Path]:
    """Write figures of scores by domain, learning curves, and confusion matrices.

    Args:
        runs: Run folders, or folders that contain run folders.
        out: Folder for all figures (default: ``figures``), or a file for the scores of one comparison.
        form: png, svg or pdf.
        metric: Metric of the scores and curves.
        allow_unfinished: Same as for ``write_tables``.
    """
    _check_figures(form)
    sets = [found.headed(metric) for found in gather(run_folders(runs), allow_unfinished, allow_unfinished)]
    if out is not None and Path(out).suffix:
        path = _target(out, "", FIGURES[form], f"--figures {form}")
        scored = [found for found in sets if found.views]
        if not scored:
            raise RunFolderError("The runs have no scores yet. Resume them, or wait for the first evaluation.")
        _save_figure(path, score_figure(scored[0], scored[0].views[-1]))
        return [path]
    folder, written = Path("figures" if out is None else out), list[Path]()
    kinds = {"scores": score_figure, "curves": curve_figure, "confusion": _confusion_figure}
    for found in sets:
        for view in found.views:
            for kind, draw in kinds.items():
                figure = draw(found, view)
                if figure is not None:
                    written.append(folder / f"{slug(found.name)}-{view}-{kind}{FIGURES[form]}")
                    _save_figure(written[-1], figure)
    return written


def write_analyses(analyses: Analyses, out: str | Path, form: str = "png") -> list[Path]:
    """Write all figures, all tables as CSV, and all numbers to ``analyses.json``.

    Args:
        analyses: Results of the analyses.
        out: Output folder, created if missing.
        form: png, svg or pdf.
    """
    _check_figures(form)
    folder, written = Path(out), list[Path]()

    def add_path(kind: str, name: str, suffix: str) -> Path:
        written.append(folder / f"{kind if kind.endswith(name) else f'{kind}-{name}'}{suffix}")
        return written[-1]

    for one in analyses:
        for name, figure in one.figures.items():
            _save_figure(add_path(one.kind, name, FIGURES[form]), figure, dots_per_inch=150)
        for name, rows in one.tables.items():
            _write_file(add_path(one.kind, name, ".csv"), _csv(rows).encode())
    written.append(folder / ANALYSES)
    numbers = json.dumps(json_values(analyses.as_json()), indent=1, ensure_ascii=False)
    _write_file(written[-1], f"{numbers}\n".encode())
    return written


def _check_figures(form: str) -> None:
    if form not in FIGURES:
        raise SettingError(f"--figures does not support {form!r}. {nearest(form, FIGURES)}")


def _target(out: str | Path | None, name: str, suffix: str, option: str) -> Path:
    """Return the output file: ``out`` itself, or a file called ``name`` in the folder ``out``."""
    if out is None:
        return Path(name)
    path = Path(out)
    if path.is_dir() or not path.suffix:
        return path / name
    if path.suffix != suffix:
        raise SettingError(f"{option} writes {suffix} files, but -o is {path.name}. Use {path.stem}{suffix}, or pass a folder.")
    return path


def _write_file(path: Path, content: bytes) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, content)
    except OSError as error:
        raise RunFolderError(f"Cannot write to {path}: {error.strerror or error}. Choose another -o.") from error


# ------------------------------------------------------------------------------------------------------------------- tables


def _cells(runs: RunSet, view: str, bold: str, spread: str, escaped: Callable[[str], str]) -> list[list[str]]:
    """Return a row per method, best first; ``bold`` and ``spread`` are templates for the best scores and for errors."""

    def written(cell: Cell) -> str:
        if cell.number is None:
            return "-"
        value, error, _ = cell.number
        text = bold.format(percent(value)) if cell.best else percent(value)
        return text + ("" if math.isnan(error) else spread.format(percent(error)))

    columns = runs.columns(view)
    return [[escaped(row.label), *map(written, runs.cells(row, columns))] for row in runs.ranked(view)]


def _baseline_cells(runs: RunSet, view: str) -> list[str]:
    columns = runs.columns(view)
    baseline = runs.baseline(columns)
    return [points(baseline[c]) if c in baseline else "-" for c in columns] if baseline else []


def _title(runs: RunSet, view: str) -> str:
    domains = "one domain held out at a time" if runs.left_out else f"{view} domains"
    seeds = max(len(row.seeds) for row in runs.rows)
    meaning = f"sample standard deviation over {seeds} seeds" if seeds > 1 else "standard error of one run due to its test set"
    notes = [row.note for row in runs.rows if row.missing]
    title = f"{capital(MEASURES[runs.measure])} in % on {runs.name}, {domains}; ± is the {meaning}."
    return " ".join([title, *notes])


def _verdict(runs: RunSet, view: str) -> list[str]:
    """Return the sentences of the report's verdict; empty if there is nothing to compare."""
    found = verdict_of(runs, view) if len(runs.rows) > 1 else None
    return [] if found is None else [found.title, *found.sentences]


def _markdown(sets: Iterable[RunSet]) -> str:
    parts = []
    for runs, view in ((one, view) for one in sets for view in one.views):
        names = [column.name for column in runs.columns(view)]
        lines = [f"| {' | '.join(['method', *names])} |".replace("|  |", "|"), f"|---|{'---:|' * len(names)}"]
        lines += [f"| {' | '.join(cells)} |" for cells in _cells(runs, view, "**{}**", " ± {}", _md)]
        base = _baseline_cells(runs, view)
        lines += [f"| {' | '.join(['*most frequent class*', *base])} |"] if base else []
        parts.append(f"{_title(runs, view)}\n\n" + "\n".join(lines))
        parts += [" ".join(map(_md, _verdict(runs, view)))] if len(runs.rows) > 1 else []
    return "\n\n".join(parts) + "\n"


def _md(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _latex(sets: Iterable[RunSet]) -> str:
    parts = ["% requires \\usepackage{booktabs}"]
    for runs, view in ((one, view) for one in sets for view in one.views):
        names = [column.name for column in runs.columns(view)]
        head = f"{' & '.join(map(_tex, ['method', *names]))} \\\\"
        lines = [f"\\begin{{tabular}}{{l{'r' * len(names)}}}", "\\toprule", head, "\\midrule"]
        spread = " {{\\footnotesize$\\pm${}}}"
        lines += [" & ".join(cells) + " \\\\" for cells in _cells(runs, view, "\\textbf{{{}}}", spread, _tex)]
        base = _baseline_cells(runs, view)
        lines += ["\\midrule", " & ".join(["most frequent class", *base]) + " \\\\"] if base else []
        title, *sentences = _verdict(runs, view) or [""]
        caption = _tex(f"{_title(runs, view)} {title}".strip())
        lines = [*(f"% {' '.join(text.split())}" for text in sentences), *lines]
        body = "\n".join([*lines, "\\bottomrule", "\\end{tabular}"])
        parts.append(f"\\begin{{table}}\n\\centering\n\\caption{{{caption}}}\n{body}\n\\end{{table}}")
    return "\n\n".join(parts) + "\n"


def _tex(text: str) -> str:
    special = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "±": r"$\pm$", MARK: r"$\dagger$"}
    return "".join(
        special.get(char, f"\\{char}" if char in "&%$#_{}" else char) for char in " ".join(text.split()).replace("−", "-")
    )


def _records(sets: Iterable[RunSet]) -> list[dict[str, Any]]:
    return [record for runs in sets for measure in runs.task.measures for record in _scores(runs.by(measure))]


def _scores(runs: RunSet) -> Iterator[dict[str, Any]]:
    """Yield a score per method, seed and column, with the marks of the tables."""
    for row, view in ((row, view) for row in runs.rows for view in runs.views):
        columns = runs.columns(view)
        for column, cell in zip(columns, runs.cells(row, columns), strict=True):
            finals = row.finals(view, column.key)
            for run in (run for run in row.counted if run.seed in finals):
                yield {
                    "data": runs.name,
                    "method": row.method,
                    "seed": run.seed,
                    "round": run.reached,
                    "state": run.state,
                    "view": view,
                    "domain": column.name,
                    "over_domains": not isinstance(column.key, str),
                    "measure": runs.measure,
                    "value": finals[run.seed],
                    "test_images": runs.test_size(view, column.key) if isinstance(column.key, str) else None,
                    "best": cell.best,
                    "missing": row.note,
                }


def _compared(sets: Iterable[RunSet]) -> list[dict[str, Any]]:
    """Return the scores of the primary metric, with the verdict on each method compared with the best one."""
    found = []
    for runs in sets:
        pairs = {(one.view, pair.behind.method): pair for one in verdicts_of(runs) for pair in one.differences}
        for record in _records([runs]):
            pair = pairs.get((record["view"], record["method"])) if record["measure"] == runs.measure else None
            low, high = (pair and pair.ends) or (None, None)
            against = {"compared_with": pair.ahead.method, "verdict": describe(pair)} if pair else dict.fromkeys(COMPARED)
            found.append({**record, **against, "interval_low": low, "interval_high": high})
    return found


def _csv(rows: Sequence[Mapping[str, Any]]) -> str:
    file = io.StringIO()
    writer = csv.DictWriter(file, list(rows[0]) if rows else ["empty"], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return file.getvalue()


def _json(sets: Sequence[RunSet]) -> str:
    costs = [
        {
            "data": runs.name,
            "method": row.method,
            "training_bytes_up": row.total_bytes(directions=["up"]),
            "training_bytes_down": row.total_bytes(directions=["down"]),
            "training_seconds": row.seconds,
        }
        for runs in sets
        for row in runs.rows
    ]
    states = [
        {
            "data": runs.name,
            "method": row.method,
            "seed": run.seed,
            "run": run.path,
            "round": run.reached,
            "rounds": run.rounds,
            "state": run.state,
            "diverged": run.divergence and run.divergence.as_json(),
        }
        for runs in sets
        for row in runs.rows
        for run in row.records
    ]
    metrics = {runs.name: runs.measure for runs in sets}
    verdicts = [{"data": runs.name, **verdict.as_json()} for runs in sets for verdict in verdicts_of(runs)]
    found = json_values({"metric": metrics, "runs": states, "scores": _records(sets), "verdicts": verdicts, "costs": costs})
    return json.dumps(found, indent=1, ensure_ascii=False) + "\n"


# ------------------------------------------------------------------------------------------------------------------ figures


def _save_figure(path: Path, figure: Any, dots_per_inch: int = 200) -> None:
    # Without a date, the same figure gives the same file.
    metadata = {".png": {}, ".svg": {"Date": None}}.get(path.suffix, {"CreationDate": None})
    file = io.BytesIO()
    figure.savefig(file, format=path.suffix[1:], dpi=dots_per_inch, metadata=metadata)
    _write_file(path, file.getvalue())


def score_figure(runs: RunSet, view: str) -> Any:
    return runs.draw_dots(runs.ranked(view), runs.columns(view))


def curve_figure(runs: RunSet, view: str) -> Any | None:
    """Draw the mean over domains by round, with a band of one deviation over seeds; return None for a single scored round."""
    if all(len(row.rounds(view)) < 2 for row in runs.rows):
        return None
    from matplotlib.ticker import MaxNLocator

    figure = empty_figure(4.2, 3.0)
    axes = figure.add_subplot()
    for index, row in enumerate(runs.ranked(view)):
        rounds = [number for number in row.rounds(view) if row.scores(view, MEAN, number)]
        values = [list(row.scores(view, MEAN, number).values()) for number in rounds]
        middle = [100 * average(one) for one in values]
        colour = COLOURS[index % len(COLOURS)]
        axes.plot(rounds, middle, color=colour, marker=MARKERS[index % len(MARKERS)], markersize=3, linewidth=1.2, label=row.label)
        wide = [100 * deviation(one) for one in values]
        if wide and not any(map(math.isnan, wide)):
            low, high = ([m + sign * w for m, w in zip(middle, wide, strict=True)] for sign in (-1, 1))
            axes.fill_between(rounds, low, high, color=colour, alpha=0.15, linewidth=0)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axes.set_xlabel("round")
    axes.set_ylabel(f"mean {MEASURES[runs.measure]}, %")
    axes.grid(linewidth=0.4)
    axes.legend(fontsize=7)
    return figure


def _confusion_figure(runs: RunSet, view: str) -> Any | None:
    """Draw the confusion matrices of the best method, one per domain; return None if there are none."""
    best = runs.ranked(view)[0]
    found = {domain: matrix for domain in runs.domains(view) if (matrix := best.confusion(view, domain)) is not None}
    if not found:
        return None
    figure = empty_figure(2.6 * len(found), 2.7)
    for index, (domain, matrix) in enumerate(found.items()):
        axes = figure.add_subplot(1, len(found), index + 1)
        fractions = [[value / (sum(row) or 1) for value in row] for row in matrix]
        axes.imshow(fractions, cmap="Blues", vmin=0, vmax=1)
        names = best.first.class_names(len(matrix))
        axes.set_title(domain if index else f"{best.label}: {domain}", fontsize=8)
        axes.set_xticks(range(len(names)), names, rotation=90, fontsize=6)
        axes.set_yticks(range(len(names)), [""] * len(names) if index else names, fontsize=6)
        axes.set_xlabel("prediction", fontsize=7)
        axes.set_ylabel("" if index else "true class", fontsize=7)
    return figure
