"""A contact sheet: the first images of every class of every domain on one picture, to see whether labels fit."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from polyfed.errors import DataError

IN_A_ROW = 8
SIDE, MARGIN, NAMES = 64, 4, 200
MOST_ROWS = 200
Rows = Mapping[tuple[str, str], list[NDArray[np.uint8]]]
"""The first images (height, width, 3) by domain and class."""


def write_sheet(rows: Rows, file: Path) -> None:
    """Write the sheet; one line for each domain and class."""
    shown = list(rows.items())[:MOST_ROWS]
    step = SIDE + MARGIN
    sheet = Image.new("RGB", (NAMES + IN_A_ROW * step, max(len(shown), 1) * step), "white")
    draw = ImageDraw.Draw(sheet)
    for line, ((domain, label), images) in enumerate(shown):
        draw.text((MARGIN, line * step + SIDE // 3), f"{domain[:30]}\n{label[:30]}", fill="black")
        for place, image in enumerate(images[:IN_A_ROW]):
            thumbnail = Image.fromarray(image).resize((SIDE, SIDE), Image.Resampling.BILINEAR)
            sheet.paste(thumbnail, (NAMES + place * step, line * step + MARGIN // 2))
    try:
        sheet.save(file)
    except (OSError, ValueError) as error:
        raise DataError(
            f"The contact sheet cannot be written to {file}: {error}. Name a .png file in a folder that exists."
        ) from error
