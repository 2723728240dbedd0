"""Jinja templates of the files for nginx, systemd and Docker."""

from __future__ import annotations

from pathlib import Path

import jinja2

FOLDER = Path(__file__).parent


def render(template: str, **values: object) -> str:
    """Render a template; a missing value is an error."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(FOLDER),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )
    return environment.get_template(template).render(**values)
