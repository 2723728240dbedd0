"""Draw small charts as inline SVG without scripts; the style sheet of the page sets their colours.

A style is a number that selects a colour (class ``s0`` to ``s7``), a dash and a marker, so that methods differ even without colour.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from markupsafe import Markup, escape

COLOURS = 8
DASHES = ("", "7 3", "2 3", "9 3 2 3", "12 4", "5 2 1 2 1 2", "1 2")
MARKERS = ("circle", "square", "triangle", "diamond", "cross", "down")
WIDTH, HEIGHT, SCATTER_HEIGHT = 340, 210, 260
MARGIN = 6
"""Distance between the vertical axis and the first value, so that markers do not overlap tick values."""
Format = Callable[[float], str]


@dataclass(frozen=True)
class Series:
    """A line through points (x, y), with a band (x, low, high) over seeds."""

    label: str
    style: int
    points: Sequence[tuple[float, float]]
    band: Sequence[tuple[float, float, float]] = ()


@dataclass(frozen=True)
class Bar:
    """A bar of segments (value, colour class, tooltip), with the error of its end."""

    label: str
    segments: Sequence[tuple[float, str, str]]
    note: str = ""
    error: float = 0.0


@dataclass(frozen=True)
class Dot:
    label: str
    style: int
    x: float
    y: float


def ticks(low: float, high: float, count: int = 5, whole: bool = False) -> list[float]:
    """Return about ``count`` round values that cover ``low`` to ``high``.

    >>> ticks(0.12, 0.93)
    [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
    """
    if not high > low:
        low, high = low - (abs(low) or 1) * 0.05, high + (abs(high) or 1) * 0.05
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= raw * 0.999)
    if whole:
        step = max(1.0, float(math.ceil(step)))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(index * step, 12) for index in range(first, last + 1)]


@dataclass(frozen=True)
class Scale:
    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        low, high, value = (math.log10(v) for v in (self.low, self.high, value)) if self.log else (self.low, self.high, value)
        fraction = (value - low) / (high - low) if high > low else 0.5
        return round(self.start + fraction * (self.end - self.start), 2)


def _shorten(text: str, max_length: int) -> str:
    return text if len(text) <= max_length else text[: max_length - 1] + "…"


def _marker(x: float, y: float, style: int, title: str = "", r: float = 3.6) -> str:
    shapes = {
        "circle": f"M{x - r} {y}a{r} {r} 0 1 0 {2 * r} 0a{r} {r} 0 1 0 {-2 * r} 0z",
        "square": f"M{x - r:.2f} {y - r:.2f}h{2 * r}v{2 * r}h{-2 * r}z",
        "triangle": f"M{x:.2f} {y - r * 1.2:.2f}l{r * 1.15:.2f} {2.1 * r:.2f}h{-2.3 * r:.2f}z",
        "diamond": f"M{x:.2f} {y - r * 1.35:.2f}l{r * 1.35:.2f} {r * 1.35:.2f}l{-r * 1.35:.2f} {r * 1.35:.2f}l{-r * 1.35:.2f} {-r * 1.35:.2f}z",
        "cross": f"M{x - r:.2f} {y - r:.2f}l{2 * r} {2 * r}m0 {-2 * r}l{-2 * r} {2 * r}",
        "down": f"M{x:.2f} {y + r * 1.2:.2f}l{r * 1.15:.2f} {-2.1 * r:.2f}h{-2.3 * r:.2f}z",
    }
    inner = f"<title>{escape(title)}</title>" if title else ""
    return f'<path class="mark s{style % COLOURS}" d="{shapes[MARKERS[style % len(MARKERS)]]}">{inner}</path>'


def swatch(style: int) -> Markup:
    line = f'<path class="line s{style % COLOURS}"{_dash(style)} d="M1 8H35"/>'
    return Markup(
        f'<svg class="swatch" viewBox="0 0 36 16" width="36" height="16" aria-hidden="true">{line}{_marker(18, 8, style)}</svg>'
    )


def _dash(style: int) -> str:
    # Colours repeat after 8 styles. The dash shifts by one each time, so that 56 styles are distinct.
    dash = DASHES[(style + style // COLOURS) % len(DASHES)]
    return f' stroke-dasharray="{dash}"' if dash else ""


def _text(x: float, y: float, text: str, anchor: str = "start", kind: str = "") -> str:
    named = f' class="{kind}"' if kind else ""
    return f'<text x="{x:.2f}" y="{y:.2f}" text-anchor="{anchor}"{named}>{escape(text)}</text>'


def _svg(height: float, title: str, body: Iterable[str], width: float = WIDTH) -> Markup:
    name = f'role="img" aria-label="{escape(title)}"'
    return Markup(f'<svg viewBox="0 0 {width:g} {height:g}" {name}><title>{escape(title)}</title>{"".join(body)}</svg>')


@dataclass(frozen=True)
class Frame:
    x: Scale
    y: Scale
    x_ticks: Sequence[float]
    y_ticks: Sequence[float]
    x_format: Format
    y_format: Format
    labels: tuple[str, str] = field(default=("", ""))

    def draw(self) -> str:
        left, right, bottom, top = self.x.start - MARGIN, self.x.end, self.y.start, self.y.end
        parts = [f'<path class="grid" d="M{left} {self.y(tick)}H{right}"/>' for tick in self.y_ticks]
        parts += [_text(left - 5, self.y(tick) + 3.5, self.y_format(tick), "end") for tick in self.y_ticks]
        parts += [f'<path class="axis" d="M{self.x(tick)} {bottom}v4"/>' for tick in self.x_ticks]
        parts += [_text(self.x(tick), bottom + 15, self.x_format(tick), "middle") for tick in self.x_ticks]
        parts.append(f'<path class="axis" d="M{left} {bottom}H{right}"/>')
        parts.append(_text((left + right) / 2, bottom + 29, self.labels[0], "middle", "name"))
        parts.append(_text(left - 5, top - 10, self.labels[1], "start", "name"))
        return "".join(parts)


def line_chart(
    series: Sequence[Series],
    title: str,
    y_ticks: Sequence[float],
    y_format: Format,
    labels: tuple[str, str],
    rounds: tuple[float, float],
) -> Markup:
    """Draw lines over rounds, with bands over seeds; a series of one point is a marker.

    Args:
        series: Lines without NaN or infinite values.
        title: Title for screen readers.
        y_ticks: Tick values of the vertical axis, which adjacent charts share.
        y_format: Formats these tick values.
        labels: Names of the horizontal and the vertical axis.
        rounds: First and last round of the horizontal axis.
    """
    first, last = rounds
    x_ticks = [tick for tick in ticks(first, last, 5, whole=True) if first <= tick <= last]
    x = Scale(first, last, 42 + MARGIN, WIDTH - 10)
    y = Scale(y_ticks[0], y_ticks[-1], HEIGHT - 34, 22)
    frame = Frame(x, y, x_ticks, y_ticks, lambda value: f"{value:g}", y_format, labels)
    bands = [_band(one, x, y) for one in series if len(one.band) > 1]
    lines = [_line(one, x, y, y_format) for one in series if one.points]
    return _svg(HEIGHT, title, [frame.draw(), *bands, *lines])


def _band(one: Series, x: Scale, y: Scale) -> str:
    def inside(value: float) -> float:
        return y(min(max(value, y.low), y.high))

    upper = [f"{x(r)} {inside(high)}" for r, _, high in one.band]
    lower = [f"{x(r)} {inside(low)}" for r, low, _ in reversed(one.band)]
    return f'<path class="band s{one.style % COLOURS}" d="M{"L".join(upper + lower)}z"/>'


def _line(one: Series, x: Scale, y: Scale, y_format: Format) -> str:
    places = [(x(r), y(value)) for r, value in one.points]
    path = "L".join(f"{px} {py}" for px, py in places)
    name = f"<title>{escape(one.label)}</title>"
    drawn = f'<path class="line s{one.style % COLOURS}"{_dash(one.style)} d="M{path}">{name}</path>' if len(places) > 1 else ""
    many = len(places) > 25
    step = max(1, len(places) // 8) if many else 1
    offset = (one.style * step // 5) % step  # markers of different lines do not overlap
    for index in [*range(offset, len(places) - 1, step), len(places) - 1]:
        (px, py), (number, value) = places[index], one.points[index]
        drawn += _marker(px, py, one.style, f"{one.label}, round {number:g}: {y_format(value)}", 2.2 if many else 2.8)
    return drawn


def bars(rows: Sequence[Bar], title: str, end: float, number: Format) -> Markup:
    """Draw horizontal bars of stacked segments below their labels, with whiskers for errors."""
    x_ticks = ticks(0, end, 4)
    return _labelled_rows(rows, title, Scale(0, x_ticks[-1], 8, WIDTH - 22), x_ticks, number, 36, _stack)


def dot_rows(rows: Sequence[Bar], title: str, number: Format) -> Markup:
    """Draw a dot per row below its label, with a whisker for its error; the axis does not start at zero."""
    ends = [value + sign * bar.error for bar in rows for value, _, _ in bar.segments for sign in (-1, 1)]
    x_ticks = ticks(min(ends, default=0.0), max(ends, default=1.0), 4)
    return _labelled_rows(rows, title, Scale(x_ticks[0], x_ticks[-1], 14, WIDTH - 22), x_ticks, number, 34, _dots)


def _labelled_rows(
    rows: Sequence[Bar],
    title: str,
    x: Scale,
    x_ticks: Sequence[float],
    number: Format,
    step: int,
    draw: Callable[[Bar, Scale, float], str],
) -> Markup:
    top, bottom = 6, 8 + step * len(rows)
    parts = [f'<path class="grid" d="M{x(tick)} {top}V{bottom}"/>' for tick in x_ticks]
    parts += [_text(x(tick), bottom + 13, number(tick), "middle") for tick in x_ticks]
    for index, bar in enumerate(rows):
        y = top + step * index
        parts += [_text(9, y + 13, _shorten(bar.label, 34), kind="label"), _text(WIDTH - 22, y + 13, bar.note, "end", "label")]
        parts.append(draw(bar, x, y))
    return _svg(bottom + 20, title, parts)


def _stack(bar: Bar, x: Scale, y: float) -> str:
    parts, total = [], 0.0
    for value, colour, tooltip in bar.segments:
        start, end = x(total), x(total + value)
        total += value
        box = f'x="{start}" y="{y + 18}" width="{max(end - start, 0):.2f}" height="14"'
        parts.append(f'<rect class="fill {colour}" {box}><title>{escape(tooltip)}</title></rect>')
    if bar.error > 0:
        low, high = x(max(total - bar.error, x.low)), x(min(total + bar.error, x.high))
        parts.append(f'<path class="whisker" d="M{low} {y + 25}H{high}M{low} {y + 22}v6M{high} {y + 22}v6"/>')
    return "".join(parts)


def _dots(bar: Bar, x: Scale, y: float) -> str:
    parts = []
    for value, colour, tooltip in bar.segments:
        if bar.error > 0:
            parts.append(f'<path class="whisker" d="M{x(value - bar.error)} {y + 23}H{x(value + bar.error)}"/>')
        place = f'cx="{x(value)}" cy="{y + 23}" r="4.5"'
        parts.append(f'<circle class="mark {colour}" {place}><title>{escape(tooltip)}</title></circle>')
    return "".join(parts)


def confusion_map(matrix: Sequence[Sequence[float]], names: Sequence[str], title: str) -> Markup:
    """Draw a confusion matrix: rows are true classes, columns predictions; darker cells contain a larger fraction of their row."""
    count = len(names)
    headers = [_shorten(name, 14) for name in names]
    # Column names are rotated by 60 degrees, so the height above the cells depends on the longest name.
    left, top, side = 84, 30 + 5.4 * max(map(len, headers), default=0), max(12.0, min(30.0, 240 / max(count, 1)))
    parts = [_text(left - 6, 12, "true class ↓   prediction →", "start", "name")] if count <= 20 else []
    for index, name in enumerate(names):
        middle = top + (index + 0.5) * side + 3.5
        parts.append(_text(left - 5, middle, _shorten(name, 13), "end"))
        x = left + (index + 0.5) * side + 3.5
        parts.append(f'<text transform="translate({x:.1f} {top - 5:.1f}) rotate(-60)" class="name">{escape(headers[index])}</text>')
    for i, row in enumerate(matrix):
        total = sum(row) or 1
        for j, value in enumerate(row):
            fraction = value / total
            box = f'x="{left + j * side:.1f}" y="{top + i * side:.1f}" width="{side - 1:.1f}" height="{side - 1:.1f}"'
            tooltip = f"{names[i]} predicted as {names[j]}: {value:g} of {sum(row):g}"
            kind = "right" if i == j else "wrong"
            opacity = f'fill-opacity="{0.04 + 0.96 * fraction:.2f}"'
            parts.append(f'<rect class="heat {kind}" {opacity} {box}><title>{escape(tooltip)}</title></rect>')
            if side >= 19 and value:
                tone = " light" if fraction > 0.55 else ""
                parts.append(
                    _text(left + (j + 0.5) * side - 0.5, top + (i + 0.5) * side + 3.5, f"{value:g}", "middle", f"cell{tone}")
                )
    return _svg(top + count * side + 8, title, parts, left + count * side + 40)


def scatter(dots: Sequence[Dot], title: str, formats: tuple[Format, Format], labels: tuple[str, str]) -> Markup:
    """Draw labelled points; the horizontal axis is logarithmic if values differ by more than a factor of thirty."""
    xs, ys = [dot.x for dot in dots], [dot.y for dot in dots]
    log = min(xs) > 0 and max(xs) > 30 * min(xs)
    if log:
        x_ticks = [10.0**power for power in range(math.floor(math.log10(min(xs))), math.ceil(math.log10(max(xs))) + 1)]
    else:
        x_ticks = ticks(0, max(xs) * 1.02 or 1, 4)
    pad = (max(ys) - min(ys)) * 0.1 or 0.01
    y_ticks = ticks(min(ys) - pad, max(ys) + pad, 5)
    x = Scale(x_ticks[0], x_ticks[-1], 42 + MARGIN, WIDTH - 22, log)
    y = Scale(y_ticks[0], y_ticks[-1], SCATTER_HEIGHT - 34, 22)
    frame = Frame(x, y, x_ticks, y_ticks, *formats, labels)
    marks = [_marker(x(d.x), y(d.y), d.style, f"{d.label}: {d.y:.3f}, {formats[0](d.x)}", 5) for d in dots]
    return _svg(SCATTER_HEIGHT, title, [frame.draw(), *marks, *_place_labels(dots, x, y)])


def _place_labels(dots: Sequence[Dot], x: Scale, y: Scale) -> list[str]:
    """Draw labels next to their points, on the side with more space, and move them down until they do not overlap."""
    parts, taken = [], list[tuple[float, float, float]]()
    for dot in sorted(dots, key=lambda dot: -dot.y):
        name = _shorten(dot.label, 30)
        left_side = x(dot.x) > (x.start + x.end) / 2
        width = 6.2 * len(name)
        start = x(dot.x) - 9 - width if left_side else x(dot.x) + 9
        height = y(dot.y) + 4
        while any(abs(height - other) < 12 and start < end and begin < start + width for begin, end, other in taken):
            height += 12
        taken.append((start, start + width, height))
        parts.append(_text(x(dot.x) - 9 if left_side else start, height, name, "end" if left_side else "start", "label"))
    return parts


def heat_map(values: Sequence[Sequence[float | None]], rows: Sequence[str], columns: Sequence[str], title: str) -> Markup:
    """Draw a grid of numbers; larger numbers have a more opaque background, and None leaves a cell empty."""
    found = [value for line in values for value in line if value is not None]
    low, high = min(found, default=0.0), max(found, default=1.0)
    left, top, height = 86, 22, 24
    width = (WIDTH - left - 6) / max(len(columns), 1)
    parts = [_text(left + (index + 0.5) * width, top - 7, _shorten(name, 10), "middle") for index, name in enumerate(columns)]
    for number, (name, line) in enumerate(zip(rows, values, strict=True)):
        y = top + number * height
        parts.append(_text(left - 6, y + 16, _shorten(name, 14), "end"))
        for index, value in enumerate(line):
            if value is not None:
                opacity = 0.15 + 0.7 * ((value - low) / (high - low) if high > low else 0.5)
                box = f'x="{left + index * width:.2f}" y="{y}" width="{width - 2:.2f}" height="{height - 2}"'
                parts.append(f'<rect class="fill s0" fill-opacity="{opacity:.2f}" {box}/>')
                parts.append(_text(left + (index + 0.5) * width - 1, y + 16, f"{value:.1f}", "middle", "label"))
    return _svg(top + height * len(rows) + 6, title, parts)
