"""Reports as a reader sees them."""

from __future__ import annotations

import html as html_text
import re


def words(page: str) -> str:
    """What a reader sees, in one line."""
    body = re.sub(r"<(style|script)[^>]*>.*?</\1>", "", page, flags=re.DOTALL)
    return re.sub(r"\s+", " ", html_text.unescape(re.sub(r"<[^>]*>", " ", body)))
