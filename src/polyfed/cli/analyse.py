"""``polyfed analyse``: why a method works, from its run folders: pictures, and every number behind them."""

from __future__ import annotations

from typing import Any

import click

from polyfed import api
from polyfed.cli.options import REOPENED, argument, command, flag, several, shared
from polyfed.cli.output import print_json, print_line, status, warn
from polyfed.cli.tables import print_table
from polyfed.errors import SettingError


@command(
    "analyse",
    "polyfed analyse runs/digits-mini-fedavg-seed0 runs/digits-mini-fedbn-seed0",
    "polyfed analyse runs/digits-mini-fedbn-seed0 --kind tsne --kind confidence -o why/",
)
@argument("runs", "RUN...", "Run folders, or folders that hold run folders.", nargs=-1)
@several("--kind", metavar="NAME", help="One kind of analysis; may be repeated. Default: all.")
@click.option("--out", "-o", metavar="DIR", default="analysis", help="Folder of the pictures, tables and numbers.")
@click.option("--figures", metavar="FORM", default="png", help="Form of the pictures: png, svg or pdf.")
@flag("--kinds", help="Say what kinds there are, and end.")
@click.option("--root", metavar="DIR", help="Folder of the runs' own data, if they moved.")
@shared(*REOPENED, "json", "quiet")
def analyse(
    runs: tuple[str, ...], kind: tuple[str, ...], out: str, figures: str, kinds: bool, as_json: bool, quiet: bool, **how: Any
) -> None:
    """Look into trained runs: statistics, features, gradients, confidence. The runs stay as they are; some analyses need their data."""
    from polyfed.studies.analyse.kinds import KINDS
    from polyfed.studies.report.exports import write_analyses

    if kinds:
        rows = [(name, known.what, "yes" if known.needs_data else "no") for name, known in KINDS.items()]
        print_table("", ("kind", "what it shows", "needs the data"), rows)
        return
    if not runs:
        raise SettingError(
            "Name at least one run folder: polyfed analyse RUN... (polyfed analyse --kinds says what kinds there are)."
        )
    with status("Looking into the runs", quiet):
        found = api.analyse(runs, kind, notify=warn, **how)
        written = write_analyses(found, out, figures)
    if not quiet:
        for one in found:
            print_line(f"{one.kind}: {one.sentence}")
        for left in found.skipped:
            print_line(f"{left.kind} does not apply to {left.run}: {left.reason}")
        print_line(f"{len(written)} files in {out}")
    if as_json:
        print_json({"out": out, "files": [path.name for path in written], **found.as_json()})
