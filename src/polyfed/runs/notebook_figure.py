"""A figure that a notebook shows as a picture. Imported only where something is drawn: matplotlib takes a while to load."""

from __future__ import annotations

import io

from matplotlib.figure import Figure

DOTS_PER_INCH = 90


class NotebookFigure(Figure):
    """A matplotlib figure that no window shows by itself; the last value of a cell is drawn without pyplot or a magic command."""

    def _repr_png_(self) -> bytes:
        file = io.BytesIO()
        self.savefig(file, format="png", dpi=DOTS_PER_INCH)
        return file.getvalue()
