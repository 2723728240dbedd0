"""``polyfed audit``: look after audit logs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

EXAMPLE = "Example: polyfed audit verify node-1/audit.jsonl"

audit_app = typer.Typer(help="Audit logs of servers and nodes.", no_args_is_help=True)


@audit_app.command("verify", epilog=EXAMPLE)
def verify(
    file: Annotated[str, typer.Argument(metavar="FILE", help="audit.jsonl of a server or node.")],
    expect: Annotated[
        str, typer.Option("--expect", metavar="HASH", help="A last hash that was noted before; it must still be in the chain.")
    ] = "",
) -> None:
    """Follow the chain of hashes; a line that was changed, added or taken out is named, with exit code 2."""
    from polyfed.deploy.audit import verify as verified

    found = verified(Path(file), expect)
    print(f"{found.lines} lines, unbroken. Note the last hash elsewhere: {found.last}")
