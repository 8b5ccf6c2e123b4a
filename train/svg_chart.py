"""Line charts as inline SVG, for pages that load nothing from anywhere."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 520, 250
LEFT, RIGHT, TOP, BOTTOM = 58, 14, 12, 38  # margins around the plot
MAX_POINTS = 500  # of a line; longer ones are averaged in buckets, since there are no more pixels
NUM_TICKS = 5
COLORS = ("#1f6feb", "#d9730d", "#2a9d5c", "#9b4f96", "#c4373b", "#0e8a8a", "#8a6d3b", "#5b6676")

GREY, INK = "#57606a", "#1b1f24"
FONT = 'font-family="system-ui, sans-serif" font-size="11"'

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """`points` by rising x. `is_faint`: raw values behind a smoothed line. `has_dots`: few points, each shown."""

    points: Points
    color: str = COLORS[0]
    name: str = ""
    is_faint: bool = False
    has_dots: bool = False


@dataclass(frozen=True, slots=True)
class Axis:
    """Maps values from `low` to `high` to places from `start` to `end` of the picture."""

    low: float
    high: float
    start: float
    end: float
    is_log: bool = False  # then low is positive

    def place(self, value: float) -> float:
        low, high, value = (math.log(x) if self.is_log else x for x in (self.low, self.high, value))
        return round(self.start + (self.end - self.start) * (value - low) / (high - low), 1)

    def ticks(self) -> list[float]:
        return log_ticks(self.low, self.high) if self.is_log else linear_ticks(self.low, self.high)


def chart(
    title: str,
    lines: Sequence[Line],
    num_steps: float,
    *,
    is_log: bool = False,
    marked: tuple[float, float, str] | None = None,
) -> str:
    """A <figure> with title, legend and picture, x from 0 to `num_steps`; empty if no line has a finite point.

    `is_log`: y, unless a point is not positive; the title says so. `marked`: a point to ring, and its label.
    """
    finite = [[point for point in line.points if math.isfinite(point[1])] for line in lines]
    values = [y for points in finite for _, y in points]
    if not values:
        return ""
    across, up = Axis(0.0, max(num_steps, 1.0), LEFT, WIDTH - RIGHT), _upright(values, is_log)
    drawn = [_draw(line, thinned(points), across, up) for line, points in zip(lines, finite, strict=True)]
    ring = "" if marked is None else _ring(marked, across, up)
    named = [line for line in lines if line.name]
    legend = "".join(f'<span><i style="background:{line.color}"></i>{escape(line.name)}</span>' for line in named)
    picture = f"{_grid(across, up)}{''.join(drawn)}{ring}"
    title += " (logarithmic axis)" if up.is_log else ""
    return (
        f"<figure><figcaption>{escape(title)}</figcaption><div class=legend>{legend}</div>"
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" {FONT}>{picture}</svg></figure>'
    )


def palette(count: int) -> Sequence[str]:
    """Colors of so many lines: distinct ones, or, when there are many, a sweep from blue to red."""
    if count <= len(COLORS):
        return COLORS[:count]
    return [f"hsl({220 * (1 - index / (count - 1)):.0f},70%,45%)" for index in range(count)]


def smoothed(points: Points) -> Points:
    """The exponential moving average over about a 25th of the points, without a pull towards the first."""
    keep = 1 - 1 / max(1.0, len(points) / 25)
    total = weight = 0.0
    averaged = []
    for x, y in points:
        if math.isfinite(y):
            total, weight = keep * total + y, keep * weight + 1
            averaged.append((x, total / weight))
    return averaged


def thinned(points: Points) -> Points:
    """At most MAX_POINTS means over neighbouring points."""
    size = math.ceil(len(points) / MAX_POINTS)
    if size <= 1:
        return points
    buckets = [points[start : start + size] for start in range(0, len(points), size)]
    return [(sum(x for x, _ in part) / len(part), sum(y for _, y in part) / len(part)) for part in buckets]


def linear_ticks(low: float, high: float) -> list[float]:
    """Round numbers within low..high, about NUM_TICKS of them."""
    raw = (high - low) / NUM_TICKS
    power = 10.0 ** math.floor(math.log10(raw))
    step = power * min((1, 2, 5, 10), key=lambda factor: abs(factor - raw / power))
    return [number * step for number in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """1, 2 and 5 times powers of ten within low..high."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks = [factor * 10.0**power for power in powers for factor in (1, 2, 5)]
    return [tick for tick in ticks if low <= tick <= high]


def _upright(values: Sequence[float], is_log: bool) -> Axis:
    """With some air above and below; from 0 where that costs less than half of the height."""
    low, high = min(values), max(values)
    if is_log and low > 0:
        return Axis(low / 1.1, high * 1.1, HEIGHT - BOTTOM, TOP, is_log=True)
    air = 0.06 * (high - low) or 0.1 * abs(high) or 1.0
    return Axis(0.0 if 0 <= low < 0.5 * high else low - air, high + air, HEIGHT - BOTTOM, TOP)


def _grid(across: Axis, up: Axis) -> str:
    parts = []
    for tick in up.ticks():
        y = up.place(tick)
        parts.append(_rule(y, "#e6eaee") + _text(LEFT - 6, y + 4, f"{tick:,.6g}", "end", GREY))
    for tick in across.ticks():
        parts.append(_text(across.place(tick), HEIGHT - BOTTOM + 17, f"{tick:,.6g}", "middle", GREY))
    parts.append(_text(WIDTH - RIGHT, HEIGHT - 4, "optimizer step", "end", GREY))
    return "".join(parts) + _rule(HEIGHT - BOTTOM, "#8c959f")


def _draw(line: Line, points: Points, across: Axis, up: Axis) -> str:
    places = [(across.place(x), up.place(y)) for x, y in points]
    look = 'stroke-width="1" opacity="0.3"' if line.is_faint else 'stroke-width="1.8" stroke-linejoin="round"'
    path = " ".join(f"{x},{y}" for x, y in places)
    parts = [f'<polyline points="{path}" fill="none" stroke="{line.color}" {look}/>']
    if line.has_dots:
        for (x, y), (step, value) in zip(places, points, strict=True):
            label = f"<title>{step:g}: {value:.4g}</title>"  # shown where the pointer rests
            parts.append(f'<circle cx="{x}" cy="{y}" r="3" fill="{line.color}">{label}</circle>')
    return "".join(parts)


def _ring(marked: tuple[float, float, str], across: Axis, up: Axis) -> str:
    """A ring round the point and its label, on the side where there is room."""
    x, y = across.place(marked[0]), up.place(marked[1])
    anchor, offset = ("end", -9) if x > WIDTH / 2 else ("start", 9)
    ring = f'<circle cx="{x}" cy="{y}" r="6.5" fill="none" stroke="{INK}" stroke-width="1.5"/>'
    halo = 'paint-order="stroke" stroke="#fff" stroke-width="4"'
    return f"<g {halo}>{_text(x + offset, y + 20, marked[2], anchor, INK)}</g>{ring}"


def _rule(y: float, color: str) -> str:
    return f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y}" y2="{y}" stroke="{color}"/>'


def _text(x: float, y: float, text: str, anchor: str, color: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{color}">{escape(text)}</text>'
