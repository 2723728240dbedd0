"""``polyfed export``: a trained model as a file for other programs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from polyfed.api import export as export_run
from polyfed.cli.options import Json, LoadElsewhere, ModelAgain, Quiet, Trust
from polyfed.cli.output import busy, console, listen, print_json, print_table, table, warn
from polyfed.cli.run import RunFolderPath

if TYPE_CHECKING:
    from polyfed.runs.export import Exported

EXAMPLE = (
    "Examples:\n\npolyfed export runs/digits-mini-fedavg-seed0 --to onnx --fold -o digits.onnx\n\n"
    "polyfed export runs/digits-mini-fedbn-seed0 --client pen --to pt2"
)


def export(
    path: RunFolderPath,
    to: Annotated[str, typer.Option("--to", metavar="FORM", help="onnx, pt2 (torch.export) or safetensors.")] = "onnx",
    out: Annotated[
        str | None, typer.Option("--out", "-o", metavar="FILE", help="The file; default: the run's name with .onnx, .pt2, ...")
    ] = None,
    client: Annotated[
        str | None, typer.Option("--client", metavar="ID", help="This client's own model; default: the one model of all.")
    ] = None,
    newcomer: Annotated[bool, typer.Option("--newcomer", help="The model for somebody new, with local layers averaged.")] = False,
    fold: Annotated[
        bool, typer.Option("--fold", help="Turn standardised convolutions and batch norms into plain convolutions.")
    ] = False,
    load: LoadElsewhere = None,
    model: ModelAgain = None,
    trust: Trust = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Write a trained model to a file that other programs run; its answers are compared with the model's first."""
    listen(quiet)
    with busy("Exporting", quiet):
        found = export_run(
            path, to, out, client=client, newcomer=newcomer, fold=fold, load=load or None, model=model, trust=trust, notify=warn
        )
    if not quiet:
        print_export(found, path)
    if as_json:
        print_json(as_values(found, path))


def as_values(found: Exported, path: str) -> dict[str, Any]:
    """What was written, as one JSON object."""
    folded = None
    if found.folded is not None:
        folded = {"norms": found.folded.norms, "convolutions": found.folded.standardised, "left": list(found.folded.left)}
    forms = [{"what": form.what, "bytes": form.size, "ms_per_image": 1000 * form.seconds} for form in found.forms]
    return {
        "run": path,
        "file": str(found.path),
        "whose": found.whose,
        "difference": found.difference,
        "folded": folded,
        "forms": forms,
        "metadata": dict(found.metadata),
    }


def print_export(found: Exported, path: str) -> None:
    """Sizes and speeds before and after, and what was checked."""
    from polyfed.studies.report.words import byte_words

    shown = table(("model", "size", "ms per image"), ("size", "ms per image"))
    for form in found.forms:
        shown.add_row(form.what, byte_words(form.size), f"{1000 * form.seconds:.2f}")
    print_table(f"{found.metadata['method']}, {found.whose} model", shown)
    out = console()
    if found.folded is not None:
        left = f"; not folded: {', '.join(found.folded.left)}" if found.folded.left else ""
        out.print(f"folded: {found.folded.standardised} standardised convolutions, {found.folded.norms} batch norms{left}")
    out.print(f"logits differ by {found.difference:.1e} of the largest; times are medians of one image on one thread")
    out.print(f"file: {found.path}", soft_wrap=True, markup=False)
