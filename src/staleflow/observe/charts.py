"""Small SVG charts as text: nothing from elsewhere, no script. Exact values appear on hovering (<title>)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, WIDE = 560, 1140  # in one of two columns, and over both
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 16, 12, 40

# Okabe and Ito (2008): told apart also by the colour-blind.
PALETTE = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#B8A800", "#7A5195")
GREY = "#b5b5b5"


@dataclass(frozen=True)
class Series:
    name: str
    xs: Sequence[float]
    ys: Sequence[float]


@dataclass(frozen=True)
class Bar:
    """A piece of a row from `start` to `end`, in the row's unit."""

    start: float
    end: float
    colour: str
    tip: str
    said: str = ""  # written into it


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round numbers from `low` to `high`; only `low` when the two are as good as equal."""
    span = high - low
    if span <= max(1e-9 * abs(low), 1e-200):
        return [low]
    step = 10 ** math.floor(math.log10(span / count))
    step *= next(factor for factor in (1, 2, 5, 10) if span / (step * factor) <= count)
    return [round(i * step, 12) for i in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def number(value: float) -> str:
    """`0.123`, `12.3`, `4.5k`, `1.2M`."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            return f"{value / (1e3 if letter == 'k' else size):.3g}{letter}"
    return f"{value:.4g}"


def lines(series: Sequence[Series], x_label: str, y_label: str, height: int = 220) -> str:
    """One line for each series over a common x; y from 0 unless something lies below."""
    points = [(x, y) for one in series for x, y in zip(one.xs, one.ys, strict=True)]
    if not points:
        return nothing()
    xs, ys = [x for x, _ in points], [y for _, y in points]
    plot = _Plot(min(xs), max(xs), min(0.0, *ys), max(ys), height)
    body = [plot.frame(x_label, y_label)]
    for at, one in enumerate(series):
        colour = PALETTE[at % len(PALETTE)]
        path = " ".join(f"{plot.x(x):.1f},{plot.y(y):.1f}" for x, y in zip(one.xs, one.ys, strict=True))
        body.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.6"/>')
        radius = 3 if len(one.xs) < 40 else 1.5
        body += [
            f'<circle cx="{plot.x(x):.1f}" cy="{plot.y(y):.1f}" r="{radius}" fill="{colour}">'
            f"<title>{escape(one.name)}: {number(y)} at {number(x)}</title></circle>"
            for x, y in zip(one.xs, one.ys, strict=True)
        ]
    colours = {one.name: PALETTE[at % len(PALETTE)] for at, one in enumerate(series)}
    return _svg(height, body) + (legend(colours) if len(series) > 1 else "")


def histogram(counts: Sequence[tuple[str, float]], x_label: str, y_label: str, height: int = 200) -> str:
    """Upright bars, one for each label, in the order given."""
    if not counts:
        return nothing()
    plot = _Plot(0, len(counts), 0, max(max(value for _, value in counts), 1e-9), height)
    body = [plot.frame(x_label, y_label, x_ticks=False)]
    width = (WIDTH - _LEFT - _RIGHT) / len(counts)
    every = math.ceil(len(counts) / 16)
    for at, (label, value) in enumerate(counts):
        x, y = plot.x(at) + 0.1 * width, plot.y(value)
        body.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{0.8 * width:.1f}" height="{plot.y(0) - y:.1f}" fill="{PALETTE[0]}">'
            f"<title>{escape(label)}: {number(value)}</title></rect>"
        )
        if at % every == 0:
            body.append(_text(x + 0.4 * width, plot.y(0) + 14, label, "middle"))
    return _svg(height, body)


def rows(
    content: Sequence[tuple[str, Sequence[Bar]]],
    x_label: str,
    low: float,
    high: float,
    row: int = 18,
    page_width: int = WIDTH,
) -> str:
    """Horizontal rows of bars over a common axis: time lines, shares, quantiles."""
    if not content:
        return nothing()
    left, high = 190, max(high, low + 1e-9)
    height = _TOP + row * len(content) + _BOTTOM
    scale = (page_width - left - _RIGHT) / (high - low)
    body = []
    for tick in ticks(low, high):
        x = left + (tick - low) * scale
        body.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{height - _BOTTOM}" class="grid"/>')
        body.append(_text(x, height - _BOTTOM + 14, number(tick), "middle"))
    for at, (label, bars) in enumerate(content):
        y = _TOP + at * row
        body.append(_text(left - 6, y + row - 5, label, "end"))
        for bar in bars:
            x, width = left + (bar.start - low) * scale, (bar.end - bar.start) * scale
            body.append(
                f'<rect x="{x:.2f}" y="{y + 2}" width="{max(width, 0.4):.2f}" height="{row - 4}" fill="{bar.colour}">'
                f"<title>{escape(bar.tip)}</title></rect>"
            )
            if bar.said:
                body.append(
                    f'<text x="{x + width / 2:.1f}" y="{y + row - 5}" text-anchor="middle" class="inside">'
                    f"{escape(bar.said)}</text>"
                )
    body.append(_text((left + page_width - _RIGHT) / 2, height - 6, x_label, "middle"))
    return _svg(height, body, page_width)


def legend(colours: Mapping[str, str]) -> str:
    items = "".join(
        f'<span><i style="background:{colour}"></i>{escape(name)}</span>' for name, colour in colours.items()
    )
    return f'<p class="legend">{items}</p>'


def table(rows_of_cells: Sequence[Sequence[object]], head: Sequence[str] = ()) -> str:
    top = "<tr>" + "".join(f"<th>{escape(str(cell))}</th>" for cell in head) + "</tr>" if head else ""
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(str(cell))}</td>" for cell in cells) + "</tr>" for cells in rows_of_cells
    )
    return f"<table>{top}{body}</table>"


def tiles(figures: Sequence[tuple[str, str, str]]) -> str:
    """Figures to be seen at once: name, figure, what it is of."""
    content = "".join(
        f"<div><span>{escape(name)}</span><b>{escape(figure)}</b><span>{escape(of)}</span></div>"
        for name, figure, of in figures
    )
    return f'<div class="tiles">{content}</div>'


def folded(title: str, content: str) -> str:
    return f"<details><summary>{escape(title)}</summary>{content}</details>"


def nothing(why: str = "no data") -> str:
    return f'<p class="nothing">{escape(why)}</p>'


class _Plot:
    """The mapping from data to picture of a chart with two axes."""

    def __init__(self, x_low: float, x_high: float, y_low: float, y_high: float, height: int) -> None:
        self.x_low, self.x_high = x_low, x_high if x_high > x_low else x_low + 1
        self.y_low, self.y_high, self.height = y_low, y_high if y_high > y_low else y_low + 1, height

    def x(self, value: float) -> float:
        return _LEFT + (value - self.x_low) / (self.x_high - self.x_low) * (WIDTH - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        room = self.height - _TOP - _BOTTOM
        return _TOP + (1 - (value - self.y_low) / (self.y_high - self.y_low)) * room

    def frame(self, x_label: str, y_label: str, x_ticks: bool = True) -> str:
        parts = []
        for tick in ticks(self.y_low, self.y_high):
            y = f"{self.y(tick):.1f}"
            parts.append(f'<line x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y}" y2="{y}" class="grid"/>')
            parts.append(_text(_LEFT - 6, self.y(tick) + 4, number(tick), "end"))
        bottom = self.height - _BOTTOM
        for tick in _whole(ticks(self.x_low, self.x_high, 8)) if x_ticks else ():
            parts.append(_text(self.x(tick), bottom + 14, number(tick), "middle"))
        parts.append(_text((_LEFT + WIDTH - _RIGHT) / 2, self.height - 6, x_label, "middle"))
        middle = (_TOP + bottom) / 2
        parts.append(
            f'<text transform="translate(14 {middle}) rotate(-90)" text-anchor="middle">{escape(y_label)}</text>'
        )
        return "".join(parts)


def _whole(values: list[float]) -> list[float]:
    """Steps and versions are whole numbers: no ticks between them."""
    whole = [value for value in values if value == int(value)]
    return whole if len(whole) > 1 else values


def _text(x: float, y: float, words: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'


def _svg(height: int, body: Sequence[str], width: int = WIDTH) -> str:
    return f'<svg viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img">{"".join(body)}</svg>'
