"""``polyfed digest``: a hash of the final state of a run."""

from __future__ import annotations

from polyfed.cli.options import command, shared
from polyfed.cli.output import print_json, warn


@command("digest", "polyfed digest runs/digits-mini-fedbn-seed0")
@shared("run", "json")
def digest(path: str, as_json: bool) -> None:
    """Print a hash of the final state of the server and all clients. Identical runs have identical hashes."""
    from polyfed.runs.folder.checkpoint import digest as digest_of
    from polyfed.runs.reopen import read_snapshot

    snapshot = read_snapshot(path, warn)
    found = digest_of(snapshot)
    if as_json:
        print_json({"digest": found, "round": snapshot.round, "finished": bool(snapshot.notes.get("finished")), "run": path})
    else:
        print(found)
