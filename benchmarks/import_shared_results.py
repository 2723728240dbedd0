"""Convert result files of another form into records of the ledger, once: python benchmarks/import_shared_results.py FILE.json...

These files have a command, commit, versions, digest, accuracy by domain in percent, the best validation round and the validation curve.
Numbers are taken as they are; there are no answers by image and no costs.
"""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Any

from polyfed.core.method import parse
from polyfed.papers.ledger import FINISHED, Record, identity_of, recorded_settings, write_record
from polyfed.settings import Settings, read_change

LEDGER = Path(__file__).resolve().parents[1] / "docs" / "results" / "runs"
COUNTS = {"Amazon": 192, "Caltech": 225, "DSLR": 32, "Webcam": 59}
"""Test images of Office-Caltech-10 under the FedBN protocol."""
PACKED = "packed office_caltech10_128.tar (resized to 128 pixels)"


def settings_of(command: str) -> Settings:
    """The settings of a ``polyfed run`` command, without its folder of data."""
    words = shlex.split(command)
    if words[:2] != ["polyfed", "run"]:
        raise SystemExit(f"This is no polyfed run command: {command}")
    pairs = zip(words[3::2], words[4::2], strict=True)
    changes = dict(read_change(f"{option.removeprefix('--')}={value}") for option, value in pairs if option != "--root")
    return Settings(data=words[2], **changes)


def record_of(document: dict[str, Any]) -> Record:
    """A record with the numbers of such a file."""
    settings = settings_of(document["command"])
    versions = dict(document["versions"])
    curve = [round(value / 100, 6) for value in document["validation_curve"]]
    scores = [
        {"view": "seen", "domain": domain, "clients": 1, "count": COUNTS[domain], "accuracy": round(value / 100, 6)}
        for domain, value in document["accuracy"].items()
    ]
    return Record(
        identity=identity_of(settings),
        seed=settings.seed,
        state=FINISHED,
        settings=recorded_settings(settings),
        method=parse(settings.method).full_text,
        command=document["command"],
        commit=document["commit"],
        machine=versions.pop("machine"),
        versions={name: value for name, value in versions.items() if name != "commit"},
        digest=document["digest"],
        cost={},
        rounds=settings.rounds,
        selected_round=document["best_validation_round"],
        scores=scores,
        validation={"rounds": list(range(1, len(curve) + 1)), "accuracy": curve},
        data=PACKED,
    )


def main() -> int:
    """Write a record for each file."""
    for name in sys.argv[1:]:
        print(write_record(LEDGER, record_of(json.loads(Path(name).read_text(encoding="utf-8")))).name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
