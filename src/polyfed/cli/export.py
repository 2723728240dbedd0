"""``polyfed export``: a trained model as a file for other programs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from polyfed import api
from polyfed.cli.options import command, flag, shared
from polyfed.cli.output import listen, print_json, print_line, say, status, warn
from polyfed.cli.tables import print_table

if TYPE_CHECKING:
    from polyfed.runs.export import Exported


@command(
    "export",
    "polyfed export runs/digits-mini-fedavg-seed0 --to onnx --fold -o digits.onnx",
    "polyfed export runs/digits-mini-fedbn-seed0 --client pen --to pt2",
)
@shared("run")
@click.option("--to", metavar="FORM", default="onnx", help="onnx, pt2 (torch.export) or safetensors.")
@click.option("--out", "-o", metavar="FILE", help="The file; default: the run's name with .onnx, .pt2, ...")
@click.option("--client", metavar="ID", help="This client's own model; default: the one model of all.")
@flag("--newcomer", help="The model for somebody new, with local layers averaged.")
@flag("--fold", help="Turn standardised convolutions and batch norms into plain convolutions.")
@shared("load elsewhere", "model again", "trust", "json", "quiet")
def export(path: str, to: str, out: str | None, as_json: bool, quiet: bool, **how: Any) -> None:
    """Write a trained model to a file that other programs run; its answers are compared with the model's first."""
    listen(quiet)
    with status("Exporting", quiet):
        found = api.export(path, to, out, notify=warn, **how)
    if not quiet:
        _print(found)
    if as_json:
        print_json({"run": path, **_values(found)})


def _values(found: Exported) -> dict[str, Any]:
    folded = found.folded
    return {
        "file": str(found.path),
        "whose": found.whose,
        "difference": found.difference,
        "folded": folded and {"norms": folded.norms, "convolutions": folded.standardised, "left": list(folded.left)},
        "forms": [{"what": form.what, "bytes": form.size, "ms_per_image": 1000 * form.seconds} for form in found.forms],
        "metadata": dict(found.metadata),
    }


def _print(found: Exported) -> None:
    from polyfed.studies.report.words import format_bytes

    rows = [(form.what, format_bytes(form.size), f"{1000 * form.seconds:.2f}") for form in found.forms]
    title = f"{found.metadata['method']}, {found.whose} model"
    print_table(title, ("model", "size", "ms per image"), rows, numbers=("size", "ms per image"))
    if found.folded is not None:
        left = f"; not folded: {', '.join(found.folded.left)}" if found.folded.left else ""
        say(f"folded: {found.folded.standardised} standardised convolutions, {found.folded.norms} batch norms{left}")
    say(f"logits differ by {found.difference:.1e} of the largest; times are medians of one image on one thread")
    print_line(f"file: {found.path}")
