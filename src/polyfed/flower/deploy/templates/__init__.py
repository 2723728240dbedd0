"""Files that are generated for nginx, systemd and Docker, as Jinja templates beside this module."""

from __future__ import annotations

from pathlib import Path

import jinja2

FOLDER = Path(__file__).parent


def render(template: str, **values: object) -> str:
    """Fill in a template; a value that is missing is an error."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(FOLDER),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )
    return environment.get_template(template).render(**values)
