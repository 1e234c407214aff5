"""Charts for HTML pages: curves as inline SVG that stretches with its box, labels as text that does not.

A chart's colours and line widths are the page's style (``html_report.html``): each run has a class ``c0`` to ``c5``
and, when these are used up, a dash (``d1``, ``d2``).
"""

import dataclasses
import html
import math
from collections.abc import Sequence

import numpy as np
from matplotlib.ticker import MaxNLocator

NUM_COLOURS = 6
_WIDTH, _HEIGHT = 1000, 300
_ROOM = 1.015  # for the dots of the last step
_MOST_POINTS = 600
_DOTS_UP_TO, _MANY = 40, 200


@dataclasses.dataclass(frozen=True, kw_only=True)
class Curve:
    """Values over steps or tokens, of one run."""

    run: int
    """Index of the run, which gives the colour."""
    x: np.ndarray
    y: np.ndarray
    """NaN is a gap."""
    steps: bool = False
    """Whether a value holds until the next one, instead of being joined with it."""
    faint: bool = False
    """Whether another curve of the run stands for it."""
    dots: bool = False
    """Whether each point is marked, however many there are."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Marks:
    """Failures and returns of one run, as ticks below and above a line of their own."""

    run: int
    down: np.ndarray
    up: np.ndarray


@dataclasses.dataclass(frozen=True)
class _Axis:
    """Maps values to 0 ... 1."""

    low: float
    high: float
    log: bool = False
    whole: bool = False

    def at(self, values: np.ndarray) -> np.ndarray:
        if self.log:
            with np.errstate(divide="ignore", invalid="ignore"):
                values = np.where(values > 0, np.log(values), np.nan)
            return (values - math.log(self.low)) / (math.log(self.high) - math.log(self.low))
        return (values - self.low) / (self.high - self.low)

    def ticks(self) -> list[float]:
        values = _one_two_five(self.low, self.high) if self.log else _even(self.low, self.high, whole=self.whole)
        return [value for value in values if self.low <= value <= self.high]


def chart(
    title: str,
    unit: str,
    curves: Sequence[Curve],
    *,
    x_label: str,
    x_max: float,
    log: bool = False,
    whole: bool = False,
    percent: bool = False,
    at_least: tuple[float, float] | None = None,
    marked: Sequence[Marks] = (),
) -> str:
    """A figure with curves over 0 ... ``x_max``.

    Args:
      title: what is shown.
      unit: of the values.
      curves: the data; those without a finite value are left out.
      x_label: what the horizontal axis counts.
      x_max: its end, above 0.
      log: whether the vertical axis is logarithmic where the values differ much; what is not above 0 is a gap then.
      whole: whether the values are whole numbers.
      percent: whether the values are fractions, to be labelled in percent.
      at_least: a range that the vertical axis covers in any case.
      marked: failures to be marked at the bottom.

    Returns:
      HTML.
    """
    curves = [curve for curve in curves if _finite(curve.y, log=log).size]
    if not curves:
        return _figure(title, unit, '<p class="none">no values</p>')
    horizontal, vertical = _Axis(0.0, _ROOM * x_max), _range(curves, log=log, whole=whole, at_least=at_least)
    y_ticks = vertical.ticks()
    lines = [f'<path class="grid" d="{_grid(vertical.at(np.array(y_ticks)))}"/>']
    lines += [_rug(marks, horizontal) for marks in marked if 0 < len(marks.down) <= _MANY]
    for curve in sorted(curves, key=lambda curve: not curve.faint):
        lines.append(_drawn(curve, horizontal, vertical))
    labels = "".join(
        f'<span style="bottom:{100 * at:.1f}%">{f"{100 * tick:g}%" if percent else short(tick)}</span>'
        for tick, at in zip(y_ticks, vertical.at(np.array(y_ticks)), strict=True)
    )
    return _figure(title, unit, _plot(title, labels, "".join(lines), horizontal, x_label))


def timeline(title: str, unit: str, runs: Sequence[Marks], *, x_label: str, x_max: float) -> str:
    """A figure with a line a run, and its failures and returns as ticks below and above it."""
    horizontal, parts, labels = _Axis(0.0, _ROOM * x_max), [], []
    for row, marks in enumerate(runs):
        middle = _HEIGHT * (row + 0.5) / len(runs)
        reach = min(0.38 * _HEIGHT / len(runs), 40)
        ticks = "".join(
            f"M{at} {middle:.1f}v{sign * reach:.1f}"
            for sign, steps in ((1, marks.down), (-1, marks.up))
            for at in _places(steps, horizontal)
        )
        parts.append(
            f'<path class="grid" d="M0 {middle:.1f}H{_WIDTH}"/>'
            f'<path class="c{marks.run % NUM_COLOURS} many" d="{ticks}"/>'
        )
        labels.append(f'<span style="bottom:{100 - 100 * middle / _HEIGHT:.1f}%">{swatch(marks.run)}</span>')
    return _figure(title, unit, _plot(title, "".join(labels), "".join(parts), horizontal, x_label))


def swatch(run: int) -> str:
    """A piece of a run's line, for legends."""
    return f'<i class="swatch c{run % NUM_COLOURS} s{run // NUM_COLOURS % 3}"></i>'


def short(value: float) -> str:
    """A number in a few characters: ``1.5M``, ``20k``, ``0.25``."""
    for scale, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= scale:
            return f"{value / scale:.4g}{letter}"
    return f"{value:.4g}"


def thinned(x: np.ndarray, y: np.ndarray, most: int = _MOST_POINTS) -> tuple[np.ndarray, np.ndarray]:
    """At most ``most`` points that look the same: of each stretch its smallest and its largest value, in order."""
    if len(x) <= most:
        return x, y
    bounds = np.linspace(0, len(x), most // 2 + 1).astype(int)
    kept: list[int] = []
    for start, end in zip(bounds[:-1], bounds[1:], strict=True):
        part = y[start:end]
        if np.isfinite(part).any():
            kept += sorted({start + int(np.nanargmin(part)), start + int(np.nanargmax(part))})
        else:
            kept.append(start)
    return x[kept], y[kept]


def _figure(title: str, unit: str, content: str) -> str:
    caption = f"<figcaption>{html.escape(title)} <small>{html.escape(unit)}</small></figcaption>"
    return f"<figure>{caption}{content}</figure>\n"


def _plot(title: str, y_labels: str, paths: str, horizontal: _Axis, x_label: str) -> str:
    ticks = horizontal.ticks()
    x_labels = "".join(
        f'<span style="left:{100 * at:.1f}%">{short(tick)}</span>'
        for tick, at in zip(ticks, horizontal.at(np.array(ticks)), strict=True)
    )
    picture = (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" preserveAspectRatio="none" role="img" '
        f'aria-label="{html.escape(title)}">{paths}</svg>'
    )
    return (
        f'<div class="plot"><div class="y">{y_labels}</div><div class="area">{picture}</div>'
        f'<div class="x">{x_labels}</div><div class="label">{html.escape(x_label)}</div></div>'
    )


def _range(curves: Sequence[Curve], *, log: bool, whole: bool, at_least: tuple[float, float] | None) -> _Axis:
    values = np.concatenate([_finite(curve.y, log=log) for curve in curves])
    low, high = float(values.min()), float(values.max())
    if at_least is not None:
        low, high = min(low, at_least[0]), max(high, at_least[1])
    if log and high > 3 * low:
        around = _one_two_five(low, high)
        return _Axis(max(m for m in around if m <= low), min(m for m in around if m >= high), log=True)
    room = 0.06 * (high - low) or 0.5 * abs(high) or 1.0
    return _Axis(low - room, high + room, whole=whole)


def _drawn(curve: Curve, horizontal: _Axis, vertical: _Axis) -> str:
    x, y = thinned(curve.x, curve.y)
    points = [
        (f"{_WIDTH * u:.1f}", f"{_HEIGHT * (1 - v):.1f}") if math.isfinite(u + v) else None
        for u, v in zip(horizontal.at(x), vertical.at(y), strict=True)
    ]
    parts, drawing = [], False
    for point in points:
        if point is None:
            drawing = False
        elif not drawing:
            parts.append(f"M{point[0]} {point[1]}")
            drawing = True
        else:
            parts.append(f"H{point[0]}V{point[1]}" if curve.steps else f"L{point[0]} {point[1]}")
    weight = " faint" if curve.faint else " many" if len(points) > _MANY else ""
    drawn = f'<path class="{_style(curve.run)}{weight}" d="{"".join(parts)}"/>'
    few = len(points) <= _DOTS_UP_TO
    if curve.dots or (few and not curve.steps):
        dots = "".join(f"M{point[0]} {point[1]}h0" for point in points if point is not None)
        large = " large" if few and curve.dots else ""
        drawn += f'<path class="c{curve.run % NUM_COLOURS} dots{large}" d="{dots}"/>'
    return drawn


def _rug(marks: Marks, horizontal: _Axis) -> str:
    ticks = "".join(f"M{at} {_HEIGHT}v-14" for at in _places(marks.down, horizontal))
    return f'<path class="c{marks.run % NUM_COLOURS} rug" d="{ticks}"/>'


def _places(steps: np.ndarray, horizontal: _Axis) -> list[int]:
    return sorted({round(at) for at in _WIDTH * horizontal.at(np.asarray(steps, float))})


def _grid(heights: np.ndarray) -> str:
    return "".join(f"M0 {_HEIGHT * (1 - at):.1f}H{_WIDTH}" for at in heights)


def _style(run: int) -> str:
    return f"c{run % NUM_COLOURS} d{run // NUM_COLOURS % 3}"


def _finite(values: np.ndarray, *, log: bool) -> np.ndarray:
    return values[np.isfinite(values) & ((values > 0) | (not log))]


def _even(low: float, high: float, *, whole: bool) -> list[float]:
    ticks = MaxNLocator(6, steps=[1, 2, 5, 10], integer=whole).tick_values(low, high)
    return [0.0 if abs(tick) < 1e-9 * (high - low) else float(tick) for tick in ticks]


def _one_two_five(low: float, high: float) -> list[float]:
    """1, 2 and 5 times the powers of ten around a range; the powers alone where it is wide."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    factors = (1.0, 2.0, 5.0) if last - first <= 3 else (1.0,)
    return [factor * 10.0**power for power in range(first, last + 1) for factor in factors]
