"""``polyfed evaluate``, ``predict`` and ``export``: uses of a trained model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from polyfed import api
from polyfed.cli.guard import BAD_INPUT
from polyfed.cli.options import REOPEN_OPTIONS, argument, command, flag, shared
from polyfed.cli.output import View, console, log_to_stderr, print_json, print_line, print_text, print_warnings, status, warn
from polyfed.cli.run import print_scores
from polyfed.cli.tables import print_table
from polyfed.settings import FACTS

if TYPE_CHECKING:
    from polyfed.runs.export import Exported
    from polyfed.runs.reopen import Evaluation


@command(
    "evaluate",
    "polyfed evaluate runs/digits-mini-fedbn-seed0 --newcomer all",
    "polyfed evaluate runs/digits-mini-fedbn-seed0 my_digits/ --newcomer re-estimated",
)
@shared("run")
@argument("data", "[DATA]", "Other data to evaluate on. Domains that are new to the run count as unseen.", required=False)
@click.option("--newcomer", help=f"How to build the local layers of a newcomer: {', '.join(FACTS['newcomer'].choices)}, or all.")
@click.option("--split", default="test", help="Split to evaluate seen clients on: test or validation.")
@click.option("--part", help="Split of the new domains in DATA to evaluate on: test (default) or all.")
@click.option("--root", metavar="DIR", help="Folder with the files of DATA. Without DATA: the run's data folder, if it has moved.")
@shared(*REOPEN_OPTIONS, "wide", "explain", "json", "quiet")
def evaluate(path: str, data: str | None, wide: bool, explain: bool, as_json: bool, quiet: bool, **how: Any) -> None:
    """Evaluate each client's model on its own domain, and the newcomer model on unseen domains."""
    log_to_stderr(quiet)
    with status("Opening the run", quiet):
        found = api.evaluate(path, data, notify=warn, **how)
    if not quiet:
        for notice in found.notices:
            warn(notice)
        _print_evaluation(found, View(wide, explain))
    if as_json:
        print_json(found.summary)


def _print_evaluation(found: Evaluation, view: View) -> None:
    from polyfed.studies.report.run_record import domain_rows
    from polyfed.studies.report.words import format_rounds, percent
    from polyfed.tasks.metrics import MEASURES

    summary, choices = found.summary, found.choices
    rounds = format_rounds(summary["rounds"])
    title = f"{summary['method']} after {rounds}, on {summary['data']}"
    if len(choices) == 1:
        print_scores(summary, f"{title} (newcomer: {choices[0]})" if found.has_choice else title, view)
        return
    seen = {**summary, "scores": [score for score in summary["scores"] if score["view"] != "unseen"]}
    print_scores(seen if summary["accuracy"]["seen"] else summary, title, view)
    unseen = [row for row in domain_rows(summary) if row.view == "unseen"]
    if unseen:
        columns = ("test images", *choices)
        rows = [
            (row.domain, str(row.count), *(percent(summary["newcomer"][choice][row.domain]) for choice in choices))
            for row in unseen
        ]
        console().print()
        title = f"newcomer on unseen domains, {MEASURES[summary['metric']]} %"
        print_table(title, ("domain", *columns), rows, view, columns, [["test images"]])


@command("predict", "polyfed predict runs/digits-mini-fedbn-seed0 seven.png --client pen")
@shared("run")
@argument("images", "IMAGES...", "Image files, or folders that contain images.", nargs=-1, required=True)
@click.option("--client", metavar="ID", help="Use this client's model. Default: the newcomer model.")
@click.option("--newcomer", help=f"{FACTS['newcomer'].doc} Default: as in the run.")
@click.option(
    "--domain", metavar="NAME", help="Domain of images with more than 8 bits, if the domains of the run scale them differently."
)
@shared(*REOPEN_OPTIONS, "json", "quiet")
def predict(path: str, images: tuple[str, ...], client: str | None, as_json: bool, quiet: bool, **how: Any) -> None:
    """Predict the class and probability of each image (or labels, values or pixel fractions, depending on the task).

    Images are preprocessed as in the run.
    """
    log_to_stderr(quiet)
    with status("Opening the run", quiet):
        found = api.predict(path, images, client=client, notify=warn, **how)
    for problem in found.unreadable:
        warn(problem)
    if not quiet and found.rows:
        cells = [
            (row["image"], row[found.noun], "" if row["probability"] is None else f"{row['probability']:.3f}") for row in found.rows
        ]
        print_table(found.model, ("image", found.noun, "probability"), cells, numbers=("probability",))
    if as_json:
        warning = {"warning": found.warning} if found.warning else {}
        rest = {"client": client, "predictions": found.rows, "unreadable": found.unreadable}
        print_json({**warning, "run": path, "round": found.round, **rest})
    if found.unreadable:
        raise click.exceptions.Exit(BAD_INPUT)


@command(
    "export",
    "polyfed export runs/digits-mini-fedavg-seed0 --to onnx --fold -o digits.onnx",
    "polyfed export runs/digits-mini-fedbn-seed0 --client pen --to pt2",
)
@shared("run")
@click.option("--to", metavar="FORMAT", default="onnx", help="Format: onnx, pt2 (torch.export) or safetensors.")
@click.option("--out", "-o", metavar="FILE", help="File to write. Default: the name of the run with the suffix of the format.")
@click.option("--client", metavar="ID", help="Export this client's model. Default: the global model, if there is only one.")
@flag("--newcomer", help="Export the model for a newcomer, with averaged local layers.")
@flag("--fold", help="Fold standardised convolutions and batch norms into plain convolutions.")
@shared("moved load", "override model", "trust", "allow unfinished", "json", "quiet")
def export(path: str, to: str, out: str | None, as_json: bool, quiet: bool, **how: Any) -> None:
    """Export a trained model for use without polyfed. The exported outputs are verified against the original model."""
    log_to_stderr(quiet)
    with status("Exporting", quiet):
        found = api.export(path, to, out, notify=warn, **how)
    if not quiet:
        _print_export(found)
    if as_json:
        print_json({"run": path, **_describe_export(found)})


def _describe_export(found: Exported) -> dict[str, Any]:
    folded = found.folded
    return {
        "file": str(found.path),
        "whose": found.whose,
        "difference": found.difference,
        "folded": folded and {"norms": folded.norms, "convolutions": folded.standardised, "left": list(folded.left)},
        "forms": [{"what": form.what, "bytes": form.size, "ms_per_image": 1000 * form.seconds} for form in found.forms],
        "metadata": dict(found.metadata),
    }


def _print_export(found: Exported) -> None:
    from polyfed.studies.report.words import format_bytes

    rows = [(form.what, format_bytes(form.size), f"{1000 * form.seconds:.2f}") for form in found.forms]
    warning = found.metadata.get("warning")
    print_warnings([warning] if warning else [])
    title = f"{found.metadata['method']}, {found.whose} model"
    print_table(title, ("model", "size", "ms per image"), rows, numbers=("size", "ms per image"))
    if found.folded is not None:
        left = f"; not folded: {', '.join(found.folded.left)}" if found.folded.left else ""
        print_text(f"folded: {found.folded.standardised} standardised convolutions, {found.folded.norms} batch norms{left}")
    print_text(f"largest relative difference of the logits: {found.difference:.1e}; times are medians for one image on one thread")
    print_line(f"file: {found.path}")
