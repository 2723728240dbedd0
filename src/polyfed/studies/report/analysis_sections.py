"""Sections of the report that say why: analyses of one run of each method, as pictures with a sentence and the numbers behind them."""

from __future__ import annotations

import io
import struct
from base64 import b64encode
from collections.abc import Sequence
from typing import Any

from polyfed.settings import AUTO
from polyfed.studies.analyse.analyse import Analyses, analyse_runs, from_folders, kinds_named
from polyfed.studies.analyse.kinds import KINDS
from polyfed.studies.report.gather import Group

ALL, NONE, GRID = "all", "none", "grid"
MOST_RUNS = 6
DOTS_PER_INCH = 100


def chosen_kinds(text: str) -> list[str]:
    """The kinds that ``--analyses`` names: auto, all, none, or names with commas between them."""
    if text in (AUTO, ALL):
        return list(KINDS)
    return [] if text == NONE else kinds_named([name.strip() for name in text.split(",") if name.strip()])


def sections_of(group: Group, chosen: str) -> dict[str, Any]:
    """The analyses of a group's methods, each by its first run; those of ``auto`` read nothing but the folders."""
    kinds = [name for name in chosen_kinds(chosen) if name != GRID]
    folders = [entry.first.folders[0].path for entry in group.entries if entry.runs][:MOST_RUNS]
    if not kinds or not folders:
        return {"parts": [], "skipped": [], "note": ""}
    found = from_folders(folders, kinds) if chosen == AUTO else analyse_runs(folders, kinds, notify=lambda _: None)
    more = f" The first {MOST_RUNS} of {len(group.entries)} methods." if len(group.entries) > MOST_RUNS else ""
    left_out = entry_words(group)
    return {"parts": parts_of(found), "skipped": found.skipped, "note": f"Each method by its first run{left_out}.{more}"}


def entry_words(group: Group) -> str:
    """Which domain the analysed runs left out."""
    return f", which left out {group.left_out[0]}" if group.left_out else ""


def grid_of(groups: Sequence[Group], chosen: str) -> list[dict[str, Any]]:
    """One method against another over a grid, where the runs of the whole page make one."""
    if GRID not in chosen_kinds(chosen) or len(groups) < 2:
        return []
    folders = [part.path for group in groups for entry in group.entries for run in entry.counted for part in run.folders]
    return parts_of(from_folders(folders, [GRID]))


def parts_of(found: Analyses) -> list[dict[str, Any]]:
    """What the template shows of each analysis."""
    return [
        {
            "title": one.title,
            "what": KINDS[one.kind].what,
            "sentence": one.sentence,
            "figures": [picture(figure, f"{one.title}: {name}") for name, figure in one.figures.items()],
        }
        for one in found
    ]


def picture(figure: Any, words: str) -> dict[str, Any]:
    """A figure as a picture inside the page, with its width in the page's pixels."""
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=2 * DOTS_PER_INCH)
    content = file.getvalue()
    width = struct.unpack(">I", content[16:20])[0]
    return {"source": f"data:image/png;base64,{b64encode(content).decode()}", "words": words, "width": width // 2}
