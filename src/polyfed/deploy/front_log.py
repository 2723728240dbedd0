"""What happened at the front, from nginx's log into the audit log: every request that was not a node's own."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from polyfed.deploy.private_files import write_private
from polyfed.runs.audit_log import AuditLog

GOOD = (200, 499)
"""Answered; or the node went away before the answer."""
MOST_LINES = 100
"""Audited at one look; more are counted together, so that nobody fills the disk line by line."""
ROTATE_AT = 16 * 1024 * 1024
WHO = ("address", "request", "path", "status", "certificate", "serial", "subject", "node")


class FrontLog:
    """Reads nginx's log as it grows; where it has got to is on the disk, so that a killed server misses nothing."""

    def __init__(self, access_log: Path, audit: AuditLog) -> None:
        self.path, self.audit = access_log, audit
        self.place = access_log.with_name("access.offset")
        self.offset = int(self.place.read_text()) if self.place.exists() else 0

    def look(self) -> dict[str, dict[str, Any]]:
        """Audit what was refused since the last look; returns the last good request of each node."""
        refused: Counter[tuple[Any, ...]] = Counter()
        seen: dict[str, dict[str, Any]] = {}
        for line in self.new_lines():
            if line.get("node") and line.get("status") in GOOD:
                seen[str(line["node"])] = line
            elif line.get("status") != 200:
                refused[tuple(line.get(name) for name in WHO)] += 1
        for who, count in refused.most_common(MOST_LINES):
            self.audit.write("refused at the front", **dict(zip(WHO, who, strict=True)), count=count)
        rest = sum(refused.values()) - sum(count for _, count in refused.most_common(MOST_LINES))
        if rest:
            self.audit.write("refused at the front", count=rest, why="more kinds of requests than are listed one by one")
        return seen

    def new_lines(self) -> Iterator[dict[str, Any]]:
        """Whole lines since the last look."""
        if not self.path.exists():
            return
        if self.path.stat().st_size < self.offset:
            self.offset = 0
        before = self.offset
        with self.path.open("rb") as file:
            file.seek(self.offset)
            for text in file:
                if not text.endswith(b"\n"):
                    break
                self.offset += len(text)
                try:
                    line = json.loads(text)
                except ValueError:
                    line = {"path": text.decode(errors="replace"), "status": 0}
                yield line
        if self.offset != before:
            self._rotate()
            write_private(self.place, str(self.offset))

    def _rotate(self) -> None:
        if self.offset > ROTATE_AT and self.offset == self.path.stat().st_size:
            # nginx appends, so what it writes next begins at the start of the emptied file.
            self.path.write_bytes(b"")
            self.offset = 0
