"""Records of a run as columns, of which a page gets a bounded number of points.

A row is a step, with all that was logged of it: a validation joins the row of its step.
"""

import math
from array import array
from bisect import bisect_left
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

MOST_POINTS = 1000  # of a curve, or columns of an image
_PLACES = ("step", "tokens", "time")
_APART = {"layers": ("load", "dead"), "max_logits": ("logit",)}
"""Fields with numbers by layer: their names in `images`."""

Numbers = NDArray[np.float64]


class Column:
    """Numbers of one name, with the rows that have them; NaN where one was not finite."""

    def __init__(self) -> None:
        self.rows, self.values = array("q"), array("d")

    def set(self, row: int, value: float) -> None:
        if self.rows and self.rows[-1] == row:
            self.values[-1] = value
        else:
            self.rows.append(row)
            self.values.append(value)

    def cut(self, row: int) -> None:
        """Drop `row` and those after it."""
        end = bisect_left(self.rows, row)
        del self.rows[end:], self.values[end:]

    def since(self, low: int, high: int) -> tuple[NDArray[np.int64], Numbers]:
        """Copies of rows `low` to `high` - 1, and their numbers."""
        rows = np.array(self.rows, dtype=np.int64)
        first, end = np.searchsorted(rows, (low, high))
        return rows[first:end], np.array(self.values[first:end])


class Image:
    """Numbers by layer, of the rows that have any: a line of all layers for each."""

    def __init__(self) -> None:
        self.layers: list[str] = []
        self.rows, self._values = array("q"), array("d")

    def set(self, row: int, layers: list[str], values: list[float]) -> None:
        if layers != self.layers:
            self._widen(layers)
            known = dict(zip(layers, values, strict=True))
            values = [known.get(layer, math.nan) for layer in self.layers]
        if self.rows and self.rows[-1] == row:
            self.cut(row)
        self.rows.append(row)
        self._values.extend(values)

    def _widen(self, layers: list[str]) -> None:
        """Make room for new layers, whose earlier numbers are NaN."""
        before = len(self.layers)
        all_ = sorted({*self.layers, *layers}, key=lambda name: (len(name), name))
        wider = np.full((len(self.rows), len(all_)), np.nan)
        if before:
            places = [all_.index(layer) for layer in self.layers]
            wider[:, places] = np.array(self._values).reshape(-1, before)
        self.layers, self._values = all_, array("d", wider.ravel())

    def cut(self, row: int) -> None:
        """Drop `row` and those after it."""
        end = bisect_left(self.rows, row)
        del self.rows[end:], self._values[end * len(self.layers) :]

    def since(self, low: int, high: int) -> tuple[NDArray[np.int64], Numbers]:
        """Copies of rows `low` to `high` - 1, and a line of numbers for each."""
        rows = np.array(self.rows, dtype=np.int64)
        first, end = np.searchsorted(rows, (low, high))
        wide = len(self.layers)
        values = np.array(self._values[first * wide : end * wide])
        return rows[first:end], values.reshape(-1, wide)


class Table:
    """Rows in the order of their steps. `add` is given the records in the order of the file."""

    def __init__(self) -> None:
        self.steps, self.tokens, self.times = array("q"), array("d"), array("d")
        self.columns: dict[str, Column] = {}
        self.images: dict[str, Image] = {}

    def add(self, record: dict[str, Any]) -> bool:
        """Add a record; True if its step is before the last one, so that rows are dropped."""
        step = record["step"]
        back = bool(self.steps) and step < self.steps[-1]
        if back:
            self._cut(bisect_left(self.steps, step))
        if not self.steps or step > self.steps[-1]:
            self.steps.append(step)
            self.tokens.append(_number(record.get("tokens")))
            self.times.append(_number(record.get("time")))
        row = len(self.steps) - 1
        for name, value in record.items():
            if value is None or isinstance(value, int | float):
                if name not in _PLACES:
                    if (column := self.columns.get(name)) is None:
                        column = self.columns[name] = Column()
                    column.set(row, math.nan if value is None else value)
            elif name in _APART and isinstance(value, dict) and value:
                self._add_layers(row, value, _APART[name])
        return back

    def newest(self) -> dict[str, float | None]:
        """The last number of each name."""
        newest = {n: c.values[-1] for n, c in self.columns.items() if c.values}
        return dict(zip(newest, _listed(list(newest.values())), strict=True))

    def _cut(self, row: int) -> None:
        del self.steps[row:], self.tokens[row:], self.times[row:]
        for column in self.columns.values():
            column.cut(row)
        for image in self.images.values():
            image.cut(row)

    def _add_layers(self, row: int, values: dict[str, Any], names: Sequence[str]) -> None:
        for i, name in enumerate(names):
            found = values.values()
            numbers = [_number(v[i] if isinstance(v, list) and i < len(v) else v) for v in found]
            self.images.setdefault(name, Image()).set(row, [*values], numbers)

    def rows(self, first: int | None, last: int | None) -> tuple[int, int]:
        """First row and end of the rows of steps `first` to `last`, all by default."""
        steps = np.array(self.steps, dtype=np.int64)
        low = 0 if first is None else int(np.searchsorted(steps, first))
        high = len(steps) if last is None else int(np.searchsorted(steps, last, side="right"))
        return low, max(low, high)

    def points(self, low: int, high: int, size: int) -> dict[str, Any]:
        """Points of rows `low` to `high` - 1, `size` of them to each.

        `axis` has step, tokens and time of the last row of each point. A curve in `series` has for
        each of its points the last step, and `mean`, `low` and `high` of the numbers there (the
        latter two if a point has several rows). An image in `images` has steps too, and for each
        layer the largest number of each point. What is not finite is null.
        """
        ends = [*range((low // size + 1) * size, high, size), high] if high > low else []
        last = [end - 1 for end in ends]
        steps = np.array(self.steps, dtype=np.int64)

        def curve(column: Column, names: Sequence[str]) -> dict[str, Any] | None:
            rows, values = column.since(low, high)
            if not len(rows):
                return None
            of = thinned(rows // size, values)
            return {"step": steps[rows[of.last]].tolist()} | {
                n: _listed(getattr(of, n)) for n in names
            }

        def curves(columns: dict[str, Column], *names: str) -> dict[str, Any]:
            found = {name: curve(column, names) for name, column in columns.items()}
            return {name: of for name, of in found.items() if of is not None}

        numbers = ("mean", "low", "high")[: 3 if size > 1 else 1]
        series = curves(self.columns, *numbers)
        images = {}
        for name, image in self.images.items():
            rows, values = image.since(low, high)
            if len(rows):
                of = [thinned(rows // size, column) for column in values.T]
                lines = {n: _listed(o.high) for n, o in zip(image.layers, of, strict=True)}
                images[name] = {"step": steps[rows[of[0].last]].tolist()} | lines
        axis = {
            "step": [self.steps[row] for row in last],
            "tokens": _listed([self.tokens[row] for row in last], 17),
            "time": _listed([self.times[row] for row in last], 17),
        }
        return {"axis": axis, "series": series, "images": images}


def size_of(rows: int) -> int:
    """Rows of a point, a power of two: points that are complete stay as they are."""
    return 1 << max(0, math.ceil(math.log2(max(1, rows) / MOST_POINTS)))


class Thinned(NamedTuple):
    """Numbers by point, and the index of the last value of each."""

    last: NDArray[np.int64]
    mean: Numbers
    low: Numbers
    high: Numbers


def thinned(points: NDArray[np.int64], values: Numbers) -> Thinned:
    """Mean, smallest and largest number of each point; of numbers that are not finite NaN.

    The number of the point of each value never falls.
    """
    starts = np.flatnonzero(np.diff(points, prepend=points[0] - 1))
    last = np.append(starts[1:], len(points)) - 1
    finite = np.isfinite(values)
    count = np.add.reduceat(finite.astype(np.float64), starts)
    total = np.add.reduceat(np.where(finite, values, 0.0), starts)
    low = np.minimum.reduceat(np.where(finite, values, np.inf), starts)
    high = np.maximum.reduceat(np.where(finite, values, -np.inf), starts)
    some = count > 0
    return Thinned(
        last,
        np.divide(total, count, where=some, out=np.full(len(starts), np.nan)),
        np.where(some, low, np.nan),
        np.where(some, high, np.nan),
    )


def _listed(values: Sequence[float] | Numbers, digits: int = 6) -> list[float | None]:
    return [float(f"{v:.{digits}g}") if math.isfinite(v) else None for v in values]


def _number(value: Any) -> float:
    return value if isinstance(value, int | float) else math.nan
