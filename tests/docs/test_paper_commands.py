"""The commands on method pages have the papers' data: size, augmentation and normalisation."""

from __future__ import annotations

import re

import pytest

from helpers.paths import DOCS
from polyfed.text import read_call

COMMAND = re.compile(r"polyfed run '(pacs\([^']*\))'")
PAPERS = {
    # hFedF: Table 7 has 32 pixels, and section 4.1 follows DomainBed; its comparison has pFedHN. gPerXAN: section 4.1 and its program.
    "hfedf": {"size": 32, "augment": "domainbed", "normalise": "imagenet"},
    "pfedhn": {"size": 32, "augment": "domainbed", "normalise": "imagenet"},
    "gperxan": {"size": 224, "augment": "flip_jitter", "normalise": "imagenet"},
}


@pytest.mark.parametrize("method", sorted(PAPERS))
def test_pacs_has_the_papers_settings(method: str) -> None:
    opening = (DOCS / "methods" / f"{method}.md").read_text(encoding="utf-8").split("\n## ")[0]
    calls = [read_call(text) for text in COMMAND.findall(opening)]
    assert [dict(call.named) for call in calls] == [PAPERS[method]]
