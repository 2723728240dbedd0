"""``polyfed export``: a trained model in a file for other programs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from polyfed import api
from polyfed.cli.options import command, flag, shared
from polyfed.cli.output import log_to_stderr, print_json, print_line, print_text, status, warn
from polyfed.cli.tables import print_table

if TYPE_CHECKING:
    from polyfed.runs.export import Exported


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
@shared("moved load", "override model", "trust", "json", "quiet")
def export(path: str, to: str, out: str | None, as_json: bool, quiet: bool, **how: Any) -> None:
    """Export a trained model for use without polyfed. The exported outputs are verified against the original model."""
    log_to_stderr(quiet)
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
    from polyfed.studies.report.words import byte_words

    rows = [(form.what, byte_words(form.size), f"{1000 * form.seconds:.2f}") for form in found.forms]
    title = f"{found.metadata['method']}, {found.whose} model"
    print_table(title, ("model", "size", "ms per image"), rows, numbers=("size", "ms per image"))
    if found.folded is not None:
        left = f"; not folded: {', '.join(found.folded.left)}" if found.folded.left else ""
        print_text(f"folded: {found.folded.standardised} standardised convolutions, {found.folded.norms} batch norms{left}")
    print_text(f"largest relative difference of the logits: {found.difference:.1e}; times are medians for one image on one thread")
    print_line(f"file: {found.path}")
