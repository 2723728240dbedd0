"""Draw the images of digits-mini with five recipes. Each recipe depends only on its arguments and draws from the given generator."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from polyfed.errors import MissingExtra

Pixels: TypeAlias = NDArray[np.uint8]
"""A colour image of shape (28, 28, 3)."""
Ink: TypeAlias = NDArray[np.float32]
"""Ink coverage of each pixel from 0 to 1, of shape (height, width)."""
Box: TypeAlias = tuple[int, int, int, int, int]
"""A region of a photograph: photograph, top, left, bottom, right (bottom and right exclusive)."""

SIDE = 28
BLOCKS_DOWN, BLOCKS_ACROSS = 7, 10
_CANVAS = (240, 120)
_FONT_SIZE = 64
_LUMINANCE = np.array([0.299, 0.587, 0.114], dtype=np.float32)

PRINT_FONTS = (
    "DejaVuSans-Oblique",
    "DejaVuSansMono",
    "DejaVuSansMono-Oblique",
    "DejaVuSerif",
    "DejaVuSerif-Bold",
    "DejaVuSerif-Italic",
    "DejaVuSerif-BoldItalic",
    "STIXGeneral",
    "STIXGeneralBol",
    "STIXGeneralItalic",
    "STIXGeneralBolIta",
    "cmb10",
    "cmr10",
    "cmti10",
    "cmtt10",
)
STREET_FONTS = ("DejaVuSans", "DejaVuSans-Bold", "DejaVuSans-BoldOblique", "DejaVuSansMono-Bold", "cmss10")
_THIN_FONTS = ("DejaVuSans", "cmss10")


@dataclass(frozen=True)
class Material:
    """Resources of installed packages: handwriting (n, 8, 8) from 0 to 1 with labels, photographs, and fonts by name."""

    handwriting: Ink
    labels: NDArray[np.int64]
    photographs: NDArray[np.uint8]
    fonts: Mapping[str, Any]


@dataclass(frozen=True)
class Placement:
    """Placement of a printed digit: lengths in pixels of the final image, angle in radians."""

    height: float
    angle: float
    shear: float
    shift: tuple[float, float]
    left: str = ""
    right: str = ""
    gap: int = 8
    stroke: int = 0


def load_material() -> Material:
    """Read scikit-learn's digits and photographs and matplotlib's fonts."""
    try:
        import matplotlib
        from sklearn.datasets import load_digits, load_sample_images
    except ImportError as error:
        raise MissingExtra(
            f"digits-mini requires scikit-learn's digits and matplotlib's fonts, but {error.name} is not installed. "
            "Install them: pip install scikit-learn matplotlib pillow"
        ) from error
    digits = load_digits()
    folder = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
    # The basic layout engine is the same on every machine; the other engine depends on system libraries.
    load_font = partial(ImageFont.truetype, size=_FONT_SIZE, layout_engine=ImageFont.Layout.BASIC)
    return Material(
        handwriting=(digits.images / 16).astype(np.float32),
        labels=digits.target.astype(np.int64),
        photographs=np.stack(load_sample_images().images),
        fonts={name: load_font(folder / f"{name}.ttf") for name in PRINT_FONTS + STREET_FONTS},
    )


def photo_blocks(photographs: int, height: int, width: int) -> list[Box]:
    """Divide photographs of one size into a grid of blocks."""
    rows = np.linspace(0, height, BLOCKS_DOWN + 1).astype(int).tolist()
    columns = np.linspace(0, width, BLOCKS_ACROSS + 1).astype(int).tolist()
    return [
        (photograph, top, left, bottom, right)
        for photograph in range(photographs)
        for top, bottom in pairwise(rows)
        for left, right in pairwise(columns)
    ]


def pen(stroke: Ink) -> Pixels:
    """Draw smoothly enlarged handwriting, white on black."""
    return _to_bytes(_grey(255 * _enlarge(stroke, 24)))


def photo(stroke: Ink, photographs: NDArray[np.uint8], blocks: list[Box], rng: np.random.Generator) -> Pixels:
    """Blend handwriting with a crop of a photograph by absolute difference.

    Strokes on mid-grey vanish in such a blend, so crops are redrawn until the strokes are visible.
    """
    ink = _enlarge(stroke, 24)[..., None]
    background = blend = np.zeros((SIDE, SIDE, 3), dtype=np.float32)
    for _ in range(50):
        background = _crop(photographs, blocks, rng)
        blend = np.abs(background - 255 * ink)
        change = np.abs((blend - background) @ _LUMINANCE)
        if np.average(change, weights=ink[..., 0]) >= 55:
            break
    return _to_bytes(blend)


def print_(digit: int, fonts: Mapping[str, Any], rng: np.random.Generator) -> Pixels:
    """Draw a printed digit in random colours of sufficient contrast, rotated, sheared, scaled, shifted and sometimes blurred."""
    placement = Placement(
        height=rng.uniform(15, 22),
        angle=rng.uniform(-0.35, 0.35),
        shear=rng.uniform(-0.25, 0.25),
        shift=(rng.uniform(-2.5, 2.5), rng.uniform(-2.5, 2.5)),
        left=_neighbour(0.25, rng),
        right=_neighbour(0.25, rng),
        gap=int(rng.integers(8, 18)),
    )
    font = fonts[PRINT_FONTS[rng.integers(len(PRINT_FONTS))]]
    paper, colour = _colours(80, 255, 1.0, rng)
    picture = _paint(_draw_digit(digit, font, placement), paper, colour)
    return _to_bytes(_blur(picture, rng.uniform(0, 0.8)))


def street(digit: int, fonts: Mapping[str, Any], rng: np.random.Generator) -> Pixels:
    """Draw a bold printed digit between cut-off neighbours, with low contrast, uneven light, blur and noise."""
    name = STREET_FONTS[rng.integers(len(STREET_FONTS))]
    placement = Placement(
        height=rng.uniform(16, 22),
        angle=rng.uniform(-0.12, 0.12),
        shear=rng.uniform(-0.12, 0.12),
        shift=(rng.uniform(-1.5, 1.5), rng.uniform(-1.5, 1.5)),
        left=_neighbour(0.75, rng),
        right=_neighbour(0.75, rng),
        gap=int(rng.integers(3, 9)),
        stroke=2 if name in _THIN_FONTS else 0,
    )
    wall, paint = _colours(40, 85, 0.45, rng)
    picture = _paint(_draw_digit(digit, fonts[name], placement), wall, paint)
    picture = _blur(picture * _light(rng)[..., None], rng.uniform(0.5, 1.0))
    return _to_bytes(picture + rng.normal(0, rng.uniform(3, 8), picture.shape).astype(np.float32))


def post(stroke: Ink, rng: np.random.Generator) -> Pixels:
    """Draw handwriting with thick strokes that fill the frame, scanned in grey at low resolution with noise."""
    ink = _thicken(_enlarge(_trim(stroke), SIDE - 2))
    side = int(rng.integers(12, 16))
    stroke_grey, ground = rng.uniform(150, 220), rng.uniform(25, 70)
    scan = ground + (stroke_grey - ground) * _resize(ink, side)
    scan = scan + rng.normal(0, rng.uniform(6, 14), scan.shape).astype(np.float32)
    return _to_bytes(_grey(_resize(scan, SIDE, smooth=False)))


def _grey(picture: Ink) -> Ink:
    return np.repeat(picture[..., None], 3, axis=-1)


def _to_bytes(picture: Ink) -> Pixels:
    return np.clip(np.rint(picture), 0, 255).astype(np.uint8)


def _resize(values: Ink, side: int, smooth: bool = True) -> Ink:
    kind = Image.Resampling.BICUBIC if smooth else Image.Resampling.BILINEAR
    return np.asarray(Image.fromarray(values.astype(np.float32)).resize((side, side), kind), dtype=np.float32)


def _enlarge(stroke: Ink, side: int) -> Ink:
    """Enlarge to ``side`` with sharp edges, centred in the frame."""
    firm = np.clip((_resize(stroke, side) - 0.35) / 0.5, 0, 1)
    before = (SIDE - side) // 2
    frame = np.zeros((SIDE, SIDE), dtype=np.float32)
    frame[before : before + side, before : before + side] = firm
    return frame


def _trim(stroke: Ink) -> Ink:
    """Remove an empty column on either side. Removing more would turn a one into a block."""
    return stroke[:, int(stroke[:, 0].max() <= 0.2) : stroke.shape[1] - int(stroke[:, -1].max() <= 0.2)]


def _thicken(ink: Ink) -> Ink:
    """Extend strokes by one pixel to the right and to the bottom."""
    wider = ink.copy()
    wider[:, 1:] = np.maximum(ink[:, 1:], ink[:, :-1])
    wider[1:] = np.maximum(wider[1:], wider[:-1].copy())
    return wider


def _crop(photographs: NDArray[np.uint8], blocks: list[Box], rng: np.random.Generator) -> Ink:
    """Crop a random square of a random block, resize it to the frame, and mirror it with probability 0.5."""
    photograph, top, left, bottom, right = blocks[rng.integers(len(blocks))]
    side = int(rng.integers(SIDE, min(bottom - top, right - left) + 1))
    y, x = int(rng.integers(top, bottom - side + 1)), int(rng.integers(left, right - side + 1))
    square = Image.fromarray(photographs[photograph, y : y + side, x : x + side])
    crop = np.asarray(square.resize((SIDE, SIDE), Image.Resampling.BOX), dtype=np.float32)
    return crop[:, ::-1] if rng.random() < 0.5 else crop


def _neighbour(probability: float, rng: np.random.Generator) -> str:
    digit = str(rng.integers(10))
    return digit if rng.random() < probability else ""


def _colours(minimum: float, maximum: float, saturation: float, rng: np.random.Generator) -> tuple[Ink, Ink]:
    """Draw two colours whose luminances differ by an amount between the bounds."""
    while True:
        colours = rng.uniform(15, 240, (2, 3)).astype(np.float32)
        luminances = colours @ _LUMINANCE
        if minimum <= abs(float(luminances[0] - luminances[1])) <= maximum:
            first, second = luminances[:, None] + saturation * (colours - luminances[:, None])
            return first, second


def _paint(ink: Ink, ground: Ink, colour: Ink) -> Ink:
    return ground + (colour - ground) * ink[..., None]


def _draw_digit(digit: int, font: Any, placement: Placement) -> Ink:
    """Draw a digit with its neighbours as specified by the placement."""
    canvas = Image.new("L", _CANVAS)
    draw = ImageDraw.Draw(canvas)
    left, top, right, bottom = font.getbbox(str(digit), stroke_width=placement.stroke)
    x = _CANVAS[0] / 2 - (left + right) / 2
    y = _CANVAS[1] / 2 - (top + bottom) / 2
    write = partial(draw.text, fill=255, font=font, stroke_width=placement.stroke)
    write((x, y), str(digit))
    if placement.left:
        write((x + left - placement.gap - font.getbbox(placement.left, stroke_width=placement.stroke)[2], y), placement.left)
    if placement.right:
        write((x + right + placement.gap - font.getbbox(placement.right, stroke_width=placement.stroke)[0], y), placement.right)
    fine = canvas.transform(
        (2 * SIDE, 2 * SIDE), Image.Transform.AFFINE, _inverse_map(bottom - top, placement), Image.Resampling.BICUBIC
    )
    coarse = fine.resize((SIDE, SIDE), Image.Resampling.BOX)
    ink: Ink = np.asarray(coarse, dtype=np.float32) / np.float32(255)
    return ink


def _inverse_map(digit_height: float, placement: Placement) -> tuple[float, float, float, float, float, float]:
    """Return the affine map from pixels of the doubled frame to the canvas."""
    scale = digit_height / (2 * placement.height)
    cosine, sine = np.cos(placement.angle), np.sin(placement.angle)
    turn = np.array([[cosine, -sine], [sine, cosine]])
    matrix = scale * np.array([[1, placement.shear], [0, 1]]) @ turn
    centre = np.array([SIDE, SIDE]) + 2 * np.array(placement.shift)
    offset = np.array(_CANVAS) / 2 - matrix @ centre
    (a, b), (d, e) = matrix.tolist()
    return a, b, float(offset[0]), d, e, float(offset[1])


def _blur(picture: Ink, radius: float) -> Ink:
    """Apply a Gaussian blur. At the edges, the weights inside the frame are renormalised."""
    if radius < 0.2:
        return picture
    places = np.arange(SIDE, dtype=np.float32)
    weights = np.exp(-0.5 * ((places[:, None] - places) / np.float32(radius)) ** 2)
    weights /= weights.sum(axis=1, keepdims=True)
    return np.moveaxis(weights @ np.moveaxis(picture, -1, 0) @ weights.T, 0, -1)


def _light(rng: np.random.Generator) -> Ink:
    """Draw a linear brightness gradient across the frame."""
    angle, depth = rng.uniform(0, 2 * np.pi), rng.uniform(0.1, 0.35)
    across = np.linspace(-1, 1, SIDE, dtype=np.float32)
    slope = np.cos(angle) * across[None, :] + np.sin(angle) * across[:, None]
    gradient: Ink = (1 + depth * slope).astype(np.float32)
    return gradient
