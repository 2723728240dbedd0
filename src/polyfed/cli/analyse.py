"""``polyfed analyse``: figures and tables that show why a method works."""

from __future__ import annotations

from typing import Any

import click

from polyfed import api
from polyfed.cli.options import REOPEN_OPTIONS, argument, command, flag, repeatable, shared
from polyfed.cli.output import print_json, print_line, status, warn
from polyfed.cli.tables import print_table
from polyfed.errors import SettingError


@command(
    "analyse",
    "polyfed analyse runs/digits-mini-fedavg-seed0 runs/digits-mini-fedbn-seed0",
    "polyfed analyse runs/digits-mini-fedbn-seed0 --kind tsne --kind confidence -o why/",
)
@argument("runs", "RUN...", "Run folders, or folders that contain run folders.", nargs=-1)
@repeatable("--kind", metavar="NAME", help="Analysis to run; repeatable. Default: all.")
@click.option("--out", "-o", metavar="DIR", default="analysis", help="Folder for figures and tables.")
@click.option("--figures", metavar="FORMAT", default="png", help="Figure format: png, svg or pdf.")
@flag("--kinds", help="List the analyses, and exit.")
@click.option("--root", metavar="DIR", help="Data folder, if it has moved.")
@shared(*REOPEN_OPTIONS, "json", "quiet")
def analyse(
    runs: tuple[str, ...], kind: tuple[str, ...], out: str, figures: str, kinds: bool, as_json: bool, quiet: bool, **how: Any
) -> None:
    """Analyse trained runs: statistics, features, gradients, confidence. Runs are not modified; some analyses need their data."""
    from polyfed.studies.analyse.kinds import KINDS
    from polyfed.studies.report.exports import write_analyses

    if kinds:
        rows = [(name, known.what, "yes" if known.needs_data else "no") for name, known in KINDS.items()]
        print_table("", ("kind", "description", "needs data"), rows)
        return
    if not runs:
        raise SettingError("RUN is missing. Pass at least one run folder, or --kinds to list the analyses.")
    with status("Analysing", quiet):
        found = api.analyse(runs, kind, notify=warn, **how)
        written = write_analyses(found, out, figures)
    if not quiet:
        for analysis in found:
            print_line(f"{analysis.kind}: {analysis.sentence}")
        for skipped in found.skipped:
            print_line(f"{skipped.kind} does not apply to {skipped.run}: {skipped.reason}")
        print_line(f"Wrote {len(written)} files to {out}.")
    if as_json:
        print_json({"out": out, "files": [path.name for path in written], **found.as_json()})
