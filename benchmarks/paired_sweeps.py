"""Two methods of finished sweeps on the same test images: McNemar's test and a bootstrap over images, and the differences by seed.

python benchmarks/paired_sweeps.py SWEEP METHOD OTHER_SWEEP OTHER_METHOD
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from polyfed.studies.report.paired_tests import Answers, image_test
from polyfed.studies.report.run_record import RunRecord


def tests_of(sweep: Path, method: str) -> dict[int, dict[str, Any]]:
    """The tests of what a sweep chose for a method, by seed."""
    document = json.loads((sweep / "sweep.json").read_text(encoding="utf-8"))
    found = next((one for one in document["methods"] if one["method"] == method), None)
    if found is None:
        sys.exit(f"{sweep} has no {method!r}. Choose from: {', '.join(one['method'] for one in document['methods'])}.")
    return {test["seed"]: test for test in found["tests"]}


def answers_of(sweep: Path, tests: dict[int, dict[str, Any]]) -> dict[int, Answers]:
    """Return the predictions of the tested models by seed."""
    return {seed: RunRecord.from_folder(sweep / "final" / Path(test["run"]).name).answers for seed, test in tests.items()}


def main() -> None:
    sweep, method, other_sweep, other = Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]), sys.argv[4]
    first, second = tests_of(sweep, method), tests_of(other_sweep, other)
    found = image_test(answers_of(sweep, first), answers_of(other_sweep, second), "seen")
    if found is None:
        sys.exit("The two were not tested on the same images.")
    by_seed = [
        f"{100 * (first[seed]['accuracy']['mean'] - second[seed]['accuracy']['mean']):+.1f}" for seed in first if seed in second
    ]
    print(f"{method} against {other}: {', '.join(by_seed)} points by seed. {found.words}")


if __name__ == "__main__":
    main()
