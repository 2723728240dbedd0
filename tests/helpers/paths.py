"""Where things are, so that no test counts its parent folders."""

from __future__ import annotations

from pathlib import Path

import polyfed

TESTS = Path(__file__).resolve().parents[1]
ROOT = TESTS.parent
SOURCE = ROOT / "src"
DOCS = ROOT / "docs"
EXAMPLES = ROOT / "examples"
BENCHMARKS = ROOT / "benchmarks"
HELPERS = TESTS / "helpers"
PACKAGE = Path(polyfed.__file__).resolve().parent
