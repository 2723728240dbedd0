"""Prints the digests of a fixed set of runs as JSON, for the polyfed that Python finds. ``compare_digests.py`` calls it for two commits.

Only names that every commit has are used, so that the two sides may differ in everything but their results.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import polyfed

DATA, ROUNDS = "digits-mini", 2
TRAVELLERS = ("fedbn", "fixbn", "hfedf", "fedtan")
"""One of each kind: local layers, another phase in mid-run, weights made by the server, several messages a round."""
KILL_AFTER = 2
PATIENCE = 600


def method_names() -> list[str]:
    listed = subprocess.run(
        [sys.executable, "-m", "polyfed", "ls", "methods", "--json"], capture_output=True, text=True, check=True
    )
    found = json.loads(listed.stdout.splitlines()[-1])
    return sorted(row["name"] for row in found["items"])


def digest_of(method: str, **settings: object) -> str:
    """The digest of a run, or that the method was refused; a method that needs residual branches gets a network with them."""
    for model in (None, "resnet20"):
        try:
            return polyfed.run(DATA, method, model, **{"rounds": ROUNDS, **settings}).digest
        except polyfed.PolyfedError as error:
            refused = f"refused ({type(error).__name__})"
    return refused


def killed_and_resumed(method: str, folder: Path) -> str:
    """The digest of a run that got kill -9 after two of its four rounds, and was resumed."""
    command = ["run", DATA, "--method", method, "--rounds", "4", "--checkpoint-every", "1", "--out", str(folder), "--quiet"]
    process = subprocess.Popen([sys.executable, "-m", "polyfed", *command])
    limit = time.monotonic() + PATIENCE
    while process.poll() is None and not (folder / "checkpoint" / f"manifest-{KILL_AFTER:06d}.json").exists():
        if time.monotonic() > limit:
            raise TimeoutError(f"{method} wrote no checkpoint of round {KILL_AFTER}")
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    return polyfed.resume(folder).digest


def over_flower(method: str) -> str:
    """The digest of a run whose clients are virtual nodes of Flower."""
    settings = {item.name for item in dataclasses.fields(polyfed.Settings)}
    option = "backend" if "backend" in settings else "deliver"
    return digest_of(method, **{option: "flower"})


def cases(home: Path, flower: bool) -> dict[str, str]:
    found = {f"{method}, {ROUNDS} rounds": digest_of(method) for method in method_names()}
    for method in TRAVELLERS:
        found[f"{method}, 4 rounds"] = digest_of(method, rounds=4)
        found[f"{method}, 4 rounds, killed and resumed"] = killed_and_resumed(method, home / method)
        found[f"{method}, {ROUNDS} rounds, 2 workers"] = digest_of(method, workers="2")
    if flower:
        found["fedbn, 2 rounds, over Flower"] = over_flower("fedbn")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--flower", action="store_true", help="also a run over Flower's simulation")
    parser.add_argument("--read", metavar="DIR", help="only open the run folders in DIR, which another commit has written")
    parser.add_argument("--write", metavar="DIR", help="leave a run folder for each of the travellers in DIR")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    if options.read:
        found = {method: polyfed.open_run(Path(options.read) / method).digest for method in TRAVELLERS}
    else:
        with tempfile.TemporaryDirectory() as spare:
            found = cases(Path(options.write or spare), options.flower)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
