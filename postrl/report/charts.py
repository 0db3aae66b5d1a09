"""Charts as inline SVG: no script, colours from the page's CSS variables, so that they follow light and dark.

Lines carry their names at their ends instead of in a legend; every point says its value when the pointer rests on it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from postrl.report.markup import Html, tag

NUM_COLORS = 8
"""`--series-0` to `--series-7` in the style sheet."""
_FONT = 11
_LEFT, _TOP, _BOTTOM = 44, 10, 24


@dataclass(frozen=True)
class Series:
    """One line. A value of None (missing, or not finite) breaks it."""

    name: str
    xs: Sequence[float]
    ys: Sequence[float | None]
    color: str


def series_color(index: int) -> str:
    return f"var(--series-{index % NUM_COLORS})"


def percent(value: float) -> str:
    return f"{100 * value:.0f}\u00a0%"


def short(value: float) -> str:
    """Three significant digits: `1.2M`, `312`, `0.041`, `2e-05`."""
    size = abs(value)
    if size >= 1e6:
        return f"{value / 1e6:.3g}M"
    if size >= 1e4:
        return f"{value / 1e3:.3g}k"
    return f"{value:,.0f}" if size >= 1000 else f"{value:.3g}"


def nice_ticks(low: float, high: float, num: int = 4) -> list[float]:
    """About `num` round numbers that span [low, high]: steps of 1, 2, 2.5 or 5 times a power of ten."""
    if not high > low:
        spread = abs(low) * 0.1 or 1.0
        low, high = low - spread, low + spread
    raw = (high - low) / num
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= raw * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(index * step, 12) for index in range(first, last + 1)]


def trailing_mean(ys: Sequence[float | None], window: int) -> list[float | None]:
    """Mean of the last `window` values that are there, at each point."""
    means: list[float | None] = []
    for index in range(len(ys)):
        recent = [y for y in ys[max(0, index - window + 1) : index + 1] if y is not None]
        means.append(sum(recent) / len(recent) if recent else None)
    return means


@dataclass(frozen=True)
class _Plane:
    """Maps data to pixels, the origin at the top left."""

    x_low: float
    x_high: float
    ticks: Sequence[float]
    width: int
    height: int
    right: int

    def x(self, value: float) -> float:
        span = (self.x_high - self.x_low) or 1.0
        return round(_LEFT + (value - self.x_low) / span * (self.width - _LEFT - self.right), 1)

    def y(self, value: float) -> float:
        low, high = self.ticks[0], self.ticks[-1]
        return round(_TOP + (high - value) / (high - low) * (self.height - _TOP - _BOTTOM), 1)

    def frame(self, y_text: Callable[[float], str], x_ticks: Sequence[float]) -> list[Html]:
        """Grid lines and labels of both axes."""
        right = self.width - self.right
        parts = []
        for tick in self.ticks:
            y = self.y(tick)
            parts.append(tag("line", x1=_LEFT, x2=right, y1=y, y2=y, class_="grid"))
            parts.append(tag("text", y_text(tick), x=_LEFT - 8, y=y + 4, text_anchor="end", class_="tick"))
        for tick in x_ticks:
            parts.append(
                tag("text", short(tick), x=self.x(tick), y=self.height - 6, text_anchor="middle", class_="tick")
            )
        return parts


def _svg(label: str, width: int, height: int, *children: object) -> Html:
    return tag(
        "svg",
        tag("title", label),
        *children,
        viewBox=f"0 0 {width} {height}",
        role="img",
        class_="chart",
        xmlns="http://www.w3.org/2000/svg",
    )


def _path(plane: _Plane, series: Series) -> str:
    commands, pen_down = [], False
    for x, y in zip(series.xs, series.ys, strict=True):
        if y is None:
            pen_down = False
            continue
        commands.append(f"{'L' if pen_down else 'M'}{plane.x(x)} {plane.y(y)}")
        pen_down = True
    return "".join(commands)


def _spread(wanted: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Moves label positions apart until neighbours are `gap` pixels away from each other, within [low, high]."""
    order = sorted(range(len(wanted)), key=lambda index: wanted[index])
    placed = dict.fromkeys(order, 0.0)
    previous = low - gap
    for index in order:
        previous = placed[index] = max(wanted[index], previous + gap)
    limit = high
    for index in reversed(order):
        placed[index] = min(placed[index], limit)
        limit = placed[index] - gap
    return [placed[index] for index in range(len(wanted))]


def _x_ticks(xs: Sequence[float]) -> list[float]:
    ticks = nice_ticks(min(xs), max(xs), 5) if len(set(xs)) > 1 else [xs[0]]
    return [tick for tick in ticks if min(xs) <= tick <= max(xs) and tick == round(tick)]


def line_chart(
    label: str,
    lines: Sequence[Series],
    *,
    y_text: Callable[[float], str] = short,
    y_range: tuple[float, float] | None = None,
    width: int = 520,
    height: int = 210,
) -> Html | None:
    """Values over steps, with a trailing mean drawn over the single steps; None when there isn't a single value."""
    points = [(x, y) for line in lines for x, y in zip(line.xs, line.ys, strict=True) if y is not None]
    if not points:
        return None
    xs, ys = [x for x, _ in points], [y for _, y in points]
    low, high = y_range or (min(ys), max(ys))
    named = len(lines) > 1
    right = 12 + (7 * max(len(line.name) for line in lines) + 36 if named else 40)
    plane = _Plane(min(xs), max(xs), nice_ticks(low, high), width, height, right)
    window = max(1, len(lines[0].xs) // 10)
    parts: list[Html] = plane.frame(y_text, _x_ticks(xs))
    ends: list[tuple[Series, float]] = []
    for line in lines:
        mean = trailing_mean(line.ys, window)
        smooth = Series(
            line.name, line.xs, [m if y is not None else None for m, y in zip(mean, line.ys, strict=True)], ""
        )
        if window > 1:
            parts.append(tag("path", d=_path(plane, line), class_="line faint", stroke=line.color))
        parts.append(tag("path", d=_path(plane, smooth), class_="line", stroke=line.color))
        every = max(1, len(line.xs) // 200)
        for index, (x, y) in enumerate(zip(line.xs, line.ys, strict=True)):
            if y is None:
                parts.append(
                    tag("text", "✕", tag("title", f"{line.name}, step {short(x)}: not finite"), x=plane.x(x),
                        y=plane.y(plane.ticks[0]) - 3, text_anchor="middle", class_="broken")
                )  # fmt: skip
            elif index % every == 0 or index == len(line.xs) - 1:
                point = tag("title", f"{line.name}, step {short(x)}: {y_text(y)}")
                parts.append(tag("circle", point, cx=plane.x(x), cy=plane.y(y), r=4, class_="hover", fill=line.color))
        last = next((y for y in reversed(smooth.ys) if y is not None), None)
        if last is not None:
            ends.append((line, last))
    positions = _spread([plane.y(y) for _, y in ends], _FONT + 2, _TOP, height - _BOTTOM)
    for (line, last), y in zip(ends, positions, strict=True):
        text = f"{line.name} {y_text(last)}" if named else y_text(last)
        parts.append(tag("text", text, x=width - right + 8, y=y + 4, class_="end", style=f"fill: {line.color}"))
    return _svg(label, width, height, parts)


def stacked_bars(
    label: str, xs: Sequence[float], layers: Mapping[str, Sequence[float]], *, width: int = 520, height: int = 210
) -> Html | None:
    """One bar a step, its layers stacked from below; the largest layer first."""
    if not xs or not layers:
        return None
    names = sorted(layers, key=lambda name: -sum(layers[name]))
    totals = [sum(layers[name][index] for name in names) for index in range(len(xs))]
    right = 12 + 7 * max(len(name) for name in names) + 36
    pitch = (max(xs) - min(xs)) / max(len(xs) - 1, 1) or 1.0
    plane = _Plane(min(xs) - pitch / 2, max(xs) + pitch / 2, nice_ticks(0.0, max(totals)), width, height, right)
    bar_width = max((plane.x(pitch) - plane.x(0)) * 0.8, 0.8)
    parts: list[Html] = plane.frame(short, _x_ticks(xs))
    for index, x in enumerate(xs):
        below = 0.0
        for number, name in enumerate(names):
            value = layers[name][index]
            top, bottom = plane.y(below + value), plane.y(below)
            below += value
            parts.append(
                tag("rect", tag("title", f"{name}, step {short(x)}: {value:.1f} s"), fill=series_color(number),
                    x=round(plane.x(x) - bar_width / 2, 1), y=top, width=round(bar_width, 1),
                    height=round(max(bottom - top, 0.0), 1))
            )  # fmt: skip
    medians = {name: sorted(layers[name])[len(xs) // 2] for name in names}
    middles, below = [], 0.0
    for name in names:
        middles.append(plane.y(below + medians[name] / 2))
        below += medians[name]
    for number, (name, y) in enumerate(zip(names, _spread(middles, _FONT + 2, _TOP, height - _BOTTOM), strict=True)):
        parts.append(
            tag("text", f"{name} {short(medians[name])}", x=width - right + 8, y=y + 4, class_="end",
                style=f"fill: {series_color(number)}")
        )  # fmt: skip
    return _svg(label, width, height, parts)


@dataclass(frozen=True)
class Mark:
    """One rate with its interval in `interval_chart`; fractions."""

    name: str
    value: float
    low: float
    high: float
    color: str


def interval_chart(label: str, rows: Sequence[tuple[str, Sequence[Mark]]], *, width: int = 620) -> Html:
    """One row a domain: its rates from 0 to 100 %, each with its confidence interval."""
    row_height, left, right, top = 42, 132, 16, 8
    height = top + row_height * len(rows) + 26

    def x(value: float) -> float:
        return round(left + value * (width - left - right), 1)

    parts: list[Html] = []
    for tick in (0.0, 0.25, 0.5, 0.75, 1.0):
        parts.append(tag("line", x1=x(tick), x2=x(tick), y1=top, y2=height - 22, class_="grid"))
        parts.append(tag("text", percent(tick), x=x(tick), y=height - 6, text_anchor="middle", class_="tick"))
    for index, (name, marks) in enumerate(rows):
        middle = top + row_height * (index + 0.5)
        parts.append(tag("text", name, x=left - 14, y=middle + 4, text_anchor="end", class_="row-name"))
        for number, mark in enumerate(marks):
            y = middle + (number - (len(marks) - 1) / 2) * 11
            interval = f"95\u00a0% interval {percent(mark.low)} to {percent(mark.high)}"
            said = f"{name}, {mark.name}: {percent(mark.value)} ({interval})"
            parts.append(
                tag("g", tag("title", said),
                    tag("line", x1=x(mark.low), x2=x(mark.high), y1=y, y2=y, class_="whisker", stroke=mark.color),
                    tag("circle", cx=x(mark.value), cy=y, r=4.5, fill=mark.color))
            )  # fmt: skip
    return _svg(label, width, height, parts)


def meter(value: float, color: str = "var(--series-0)") -> Html:
    """A bar of a table cell: a fraction of its width."""
    return tag(
        "svg",
        tag("rect", x=0, y=0, width=60, height=6, rx=3, class_="meter"),
        tag("rect", x=0, y=0, width=round(60 * min(max(value, 0.0), 1.0), 1), height=6, rx=3, fill=color),
        viewBox="0 0 60 6",
        class_="meter-box",
        aria_hidden="true",
    )
