"""``polyfed analyse``: why a method works, from its run folders: pictures, and every number behind them."""

from __future__ import annotations

from typing import Annotated

import typer

from polyfed.cli.options import Device, Json, LoadElsewhere, ModelAgain, Quiet, Trust
from polyfed.cli.output import busy, console, print_json, table, warn

EXAMPLE = (
    "Examples:\n\npolyfed analyse runs/digits-mini-fedavg-seed0 runs/digits-mini-fedbn-seed0\n\n"
    "polyfed analyse runs/digits-mini-fedbn-seed0 --kind tsne --kind confidence -o why/"
)


def analyse(
    runs: Annotated[
        list[str] | None, typer.Argument(metavar="RUN...", help="Run folders, or folders that hold run folders.")
    ] = None,
    kind: Annotated[
        list[str] | None, typer.Option("--kind", metavar="NAME", help="One kind of analysis; may be repeated. Default: all.")
    ] = None,
    out: Annotated[
        str, typer.Option("--out", "-o", metavar="DIR", help="Folder of the pictures, tables and numbers.")
    ] = "analysis",
    figures: Annotated[str, typer.Option("--figures", metavar="FORM", help="Form of the pictures: png, svg or pdf.")] = "png",
    kinds: Annotated[bool, typer.Option("--kinds", help="Say what kinds there are, and end.")] = False,
    root: Annotated[str | None, typer.Option("--root", metavar="DIR", help="Folder of the runs' own data, if they moved.")] = None,
    device: Device = None,
    load: LoadElsewhere = None,
    model: ModelAgain = None,
    trust: Trust = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Look into trained runs: statistics, features, gradients, confidence. The runs stay as they are; some analyses need their data."""
    from polyfed.api import analyse as analyse_runs
    from polyfed.errors import SettingError
    from polyfed.studies.analyse.kinds import KINDS
    from polyfed.studies.report.exports import write_analyses

    if kinds:
        shown = table(("kind", "what it shows", "needs the data"))
        for name, known in KINDS.items():
            shown.add_row(name, known.what, "yes" if known.needs_data else "no")
        console().print(shown)
        return
    if not runs:
        raise SettingError(
            "Name at least one run folder: polyfed analyse RUN... (polyfed analyse --kinds says what kinds there are)."
        )
    with busy("Looking into the runs", quiet):
        found = analyse_runs(
            runs, kind or (), root=root, device=device or "auto", load=load or None, model=model, trust=trust, notify=warn
        )
        written = write_analyses(found, out, figures)
    if not quiet:
        for one in found:
            console().print(f"{one.kind}: {one.sentence}", soft_wrap=True, markup=False)
        for left in found.skipped:
            console().print(f"{left.kind} does not apply to {left.run}: {left.reason}", soft_wrap=True, markup=False)
        console().print(f"{len(written)} files in {out}", soft_wrap=True, markup=False)
    if as_json:
        print_json({"out": out, "files": [path.name for path in written], **found.as_json()})
