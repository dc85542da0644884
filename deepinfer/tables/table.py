"""Table: what every measurement is or holds. Tidy rows, exact export, and where they come from."""

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from deepinfer.tables import jsonable
from deepinfer.tables.column import Column, Mask
from deepinfer.tables.jsonable import Cell

if TYPE_CHECKING:
    import pandas
    from matplotlib.axes import Axes

SHOWN_ROWS = 20  # a screen; what is hidden is said
SHOWN_WIDTH = 110  # characters
FORMAT = "deepinfer.Table/1"
FORMULA = ("=", "+", "-", "@", "\t", "\r", "'")  # a spreadsheet runs a text that begins with one


class Table:
    """Tidy rows: one observation a row, one variable a column.

    rows: mappings from column name to an int, float, str, bool or None; scalars of NumPy and
        one-element tensors are taken too. A column that a row lacks is None there. Or a pandas
        DataFrame: an index with a name becomes a column, `attrs` of `to_pandas` are taken over.
    columns: their order; by default that of first appearance. A row with another one is refused.
    title: one line that says what was measured, with units.
    provenance: facts beside those of `tables.provenance.collect` (seeds, slots, hashes). It is not
        shown by default, for it differs between machines; the exports carry it.

    What is shown has 3 significant digits; exports have all of them. A table does not change.
    """

    def __init__(
        self,
        rows: "Iterable[Mapping[str, object]] | pandas.DataFrame" = (),
        columns: Sequence[str] | None = None,
        *,
        title: str = "",
        provenance: Mapping[str, object] | None = None,
    ) -> None:
        from deepinfer.tables.provenance import collect

        if hasattr(rows, "iloc"):  # a DataFrame, without an import of pandas
            columns = columns or _frame_columns(rows)
            title = title or str(rows.attrs.get("title", ""))
            provenance = {**rows.attrs.get("provenance", {}), **(provenance or {})}
            rows = _frame_rows(rows)
        rows = list(rows)
        found = tuple(dict.fromkeys(name for row in rows for name in row))
        self.columns: tuple[str, ...] = found if columns is None else tuple(columns)
        self.title = title
        self.provenance: dict[str, object] = jsonable.plain(collect(**(provenance or {})))
        _check_columns(self.columns, found)
        self._rows: tuple[tuple[Cell, ...], ...] = tuple(
            tuple(jsonable.cell(row.get(name), name, i) for name in self.columns)
            for i, row in enumerate(rows)
        )

    # -- reading ----------------------------------------------------------------------------------

    @property
    def rows(self) -> list[dict[str, Cell]]:
        """The rows as new dictionaries."""
        return list(self)

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[dict[str, Cell]]:
        return (dict(zip(self.columns, row, strict=True)) for row in self._rows)

    def __getitem__(self, key: "str | int | slice | Mask") -> "Column | dict[str, Cell] | Table":
        """A column by name, a row by number, or a table of the rows of a slice or of a mask.

        `t[t["source"] == "draft"]` has the rows of that source; see `Column`. Raises KeyError for
        an unknown column, ValueError for a mask of another length.
        """
        if isinstance(key, str):
            place = self._place(key)
            return Column(row[place] for row in self._rows)
        if isinstance(key, slice):
            return self._same(self._rows[key])
        if isinstance(key, (list, tuple)):
            return self._masked(key)
        if isinstance(key, bool):
            raise TypeError(
                f"t[{key}]: one bool says nothing about {len(self)} rows. Compare a column: "
                't[t["name"] == value]'
            )
        return dict(zip(self.columns, self._rows[key], strict=True))

    def where(
        self,
        test: "Callable[[dict[str, Cell]], bool] | Mask | None" = None,
        **equal: object,
    ) -> "Table":
        """The rows whose columns equal the given values and for which `test` holds.

        test: a function of the row as a dictionary, or a mask: `t.where(t["kl"] > 0.1)`.
        """
        if isinstance(test, (list, tuple)):
            return self._masked(test).where(**equal)
        places = {self._place(name): value for name, value in equal.items()}
        return self._same(
            row
            for row in self._rows
            if all(row[place] == value for place, value in places.items())
            and (test is None or test(dict(zip(self.columns, row, strict=True))))
        )

    def sort(self, *by: str, descending: bool = False) -> "Table":
        """The rows in order of one or more columns; equal rows keep their order.

        None and NaN come last in both directions. Raises TypeError for a column that holds texts
        and numbers.
        """
        rows = list(self._rows)
        for name in reversed(by):
            place = self._place(name)
            kinds = {isinstance(row[place], str) for row in rows if row[place] is not None}
            if len(kinds) > 1:
                raise TypeError(f"column {name!r} holds texts and numbers, which have no order")
            known = [row for row in rows if not _unordered(row[place])]
            known.sort(key=lambda row: row[place], reverse=descending)
            rows = known + [row for row in rows if _unordered(row[place])]
        return self._same(rows)

    def __eq__(self, other: object) -> bool:
        """Same columns, values, title and provenance. NaN equals NaN; 1, 1.0 and True differ."""
        if not isinstance(other, Table):
            return NotImplemented
        return self.to_json() == other.to_json()

    __hash__ = None  # type: ignore[assignment]  # equality looks at every cell

    # -- exports ----------------------------------------------------------------------------------

    def to_pandas(self) -> "pandas.DataFrame":
        """A DataFrame with the same columns; `attrs` holds the title and the provenance."""
        try:
            import pandas
        except ImportError as error:
            raise ImportError(
                "to_pandas needs pandas, which is not installed; pip install 'deepinfer-lab[lab]', "
                "or use .rows, .to_csv() or .to_json()"
            ) from error
        frame = pandas.DataFrame.from_records(list(self._rows), columns=list(self.columns))
        frame.attrs = {"title": self.title, "provenance": dict(self.provenance)}
        return frame

    def to_csv(self, path: "str | Path | None" = None) -> str:
        """Comma-separated text, a header line first; None is empty, NaN is `nan`. Also writes it.

        A spreadsheet runs a text that begins with `=`, `+`, `-`, `@`, a tab or a carriage return.
        Such a text, and one that begins with `'`, gets a `'` in front, so that dropping one leading
        `'` of a text gives the value back. Numbers are written as they are. CSV has no types and no
        place for provenance: use `to_json` for what is read back.
        """
        lines = [",".join(_csv(v, len(row)) for v in row) for row in [self.columns, *self._rows]]
        return _written("".join(line + "\n" for line in lines), path)

    def to_json(self, path: "str | Path | None" = None) -> str:
        """JSON that `from_json` reads back equal: types, infinities, NaN, None and provenance."""
        whole = {
            "format": FORMAT,
            "title": self.title,
            "provenance": self.provenance,
            "columns": list(self.columns),
        }
        head = json.dumps(jsonable.encode(whole), indent=1, allow_nan=False)
        lines = [json.dumps(jsonable.encode(list(row)), allow_nan=False) for row in self._rows]
        body = "[\n  " + ",\n  ".join(lines) + "\n ]" if lines else "[]"
        return _written(head.removesuffix("\n}") + f',\n "rows": {body}\n}}\n', path)

    @classmethod
    def from_json(cls, source: "str | Path") -> "Table":
        """The table that `to_json` wrote: its text, or the path of its file.

        Raises ValueError for JSON that is something else.
        """
        text = source if isinstance(source, str) and source.lstrip()[:1] == "{" else None
        whole = json.loads(Path(source).read_text("utf-8") if text is None else text)
        if not isinstance(whole, dict) or whole.get("format") != FORMAT:
            found = whole.get("format") if isinstance(whole, dict) else type(whole).__name__
            raise ValueError(f"not a table: format {FORMAT!r} expected, found {found!r}")
        missing = [n for n in ("columns", "title", "provenance", "rows") if n not in whole]
        if missing:
            raise ValueError(f"not a whole table: it has no {', '.join(missing)}")
        whole = jsonable.decode(whole)
        table = cls((), whole["columns"], title=whole["title"])
        table.provenance = whole["provenance"]
        for i, row in enumerate(whole["rows"]):
            if len(row) != len(table.columns):
                raise ValueError(f"row {i} has {len(row)} values for {len(table.columns)} columns")
        table._rows = tuple(tuple(row) for row in whole["rows"])
        return table

    # -- showing ----------------------------------------------------------------------------------

    def plot(self, x: str, y: str, by: str | None = None, ax: "Axes | None" = None) -> "Axes":
        """Draw column `y` over `x`, one line (bars, where an x is no number) a value of `by`.

        Rows are taken in order of x; rows without x or y are left out. Returns the Axes, for
        labels, limits and a logarithmic scale.
        """
        from deepinfer.display import plots

        px, py = self._place(x), self._place(y)
        pb = None if by is None else self._place(by)
        lines: dict[str, tuple[list, list]] = {}
        for row in self._in_order(px):
            if row[px] is None or row[py] is None:
                continue
            xs, ys = lines.setdefault(y if pb is None else str(row[pb]), ([], []))
            xs.append(row[px])
            ys.append(row[py])
        return plots.series(lines, x=x, y=y, by=by, title=self.title, ax=ax)

    def __repr__(self) -> str:
        from deepinfer.display.text import SHOWN_CELL, grid

        columns, rows, numeric, note = self._shown()
        if any(len(text) > SHOWN_CELL for row in rows for text in row):
            note = "; ".join(filter(None, [note, "long texts are cut, .to_text() has them whole"]))
        return grid(columns, rows, numeric, note, title=self.title, width=SHOWN_WIDTH)

    def to_text(self) -> str:
        """Aligned text of every row and column, with every value whole; `repr` shows the first of
        them and cuts long texts."""
        from deepinfer.display.text import grid

        columns, rows, numeric, note = self._shown(len(self))
        return grid(columns, rows, numeric, note, title=self.title, width=sys.maxsize, cell=None)

    def _repr_html_(self) -> str:
        from deepinfer.display import html

        columns, rows, numeric, note = self._shown()
        return html.table(columns, rows, numeric=numeric, caption=self.title, note=note)

    def _shown(
        self, most: int = SHOWN_ROWS
    ) -> tuple[tuple[str, ...], list[list[str]], set[str], str]:
        """Columns, formatted rows, the names of numeric columns, and what is hidden."""
        from deepinfer.display.numbers import fmt

        rows = [["" if v is None else fmt(v) for v in row] for row in self._rows[:most]]
        numeric = {
            name
            for i, name in enumerate(self.columns)
            if any(_number(row[i]) for row in self._rows)
            and all(_number(row[i]) or row[i] is None for row in self._rows)
        }
        hidden = len(self) - len(rows)
        them = "it" if hidden == 1 else "them"
        note = f"{hidden} of {len(self)} rows hidden; t[{len(rows)}:] shows {them}"
        note = note if hidden else "" if rows else "no rows"
        return self.columns, rows, numeric, note

    # -- inside -----------------------------------------------------------------------------------

    def _masked(self, mask: Sequence[object]) -> "Table":
        if not all(isinstance(keep, bool) for keep in mask):
            raise TypeError(
                "rows are chosen by one bool a row: compare a column, as in t[t['name'] == value]"
            )
        if len(mask) != len(self):
            raise ValueError(f"a mask of {len(mask)} rows for a table of {len(self)} rows")
        return self._same(row for row, keep in zip(self._rows, mask, strict=True) if keep)

    def _same(self, rows: Iterable[tuple[Cell, ...]]) -> "Table":
        table = Table((), self.columns, title=self.title)
        table.provenance = dict(self.provenance)
        table._rows = tuple(rows)
        return table

    def _place(self, name: str) -> int:
        if name not in self.columns:
            raise KeyError(f"no column {name!r}; the table has {', '.join(self.columns) or 'none'}")
        return self.columns.index(name)

    def _in_order(self, place: int) -> list[tuple[Cell, ...]]:
        if all(_number(row[place]) for row in self._rows if row[place] is not None):
            return sorted(self._rows, key=lambda row: (row[place] is None, row[place] or 0))
        return list(self._rows)


def _check_columns(columns: tuple[str, ...], found: tuple[str, ...]) -> None:
    for name in columns + found:
        if not isinstance(name, str):
            raise TypeError(f"column names are strings, got {name!r}")
    if len(set(columns)) != len(columns):
        raise ValueError(f"a column is named twice: {columns}")
    unknown = [name for name in found if name not in columns]
    if unknown:
        raise ValueError(f"rows have columns {unknown} that are not among {list(columns)}")


def _frame_columns(frame: "pandas.DataFrame") -> list[str]:
    named = [name for name in frame.index.names if name is not None]
    return [*named, *frame.columns]


def _frame_rows(frame: "pandas.DataFrame") -> list[dict[str, object]]:
    """The rows of a DataFrame. What pandas marks as missing (NA, NaT) is None, NaN too in a column
    of texts, which holds no number."""
    names = _frame_columns(frame)
    if named := [name for name in frame.index.names if name is not None]:
        frame = frame.reset_index(named)
    values = [_present(list(frame.iloc[:, i])) for i in range(len(names))]
    return [dict(zip(names, row, strict=True)) for row in zip(*values)]


def _present(values: list[object]) -> list[object]:
    missing = ("NAType", "NaTType")
    found = [None if type(value).__name__ in missing else value for value in values]
    texts = any(isinstance(value, str) for value in found)
    return [None if texts and value != value else value for value in found]


def _unordered(value: Cell) -> bool:
    return value is None or value != value


def _number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _csv(value: Cell, width: int) -> str:
    """One field by RFC 4180; the csv module leaves a lone carriage return unquoted."""
    text = "" if value is None else str(value)
    if isinstance(value, str) and text.startswith(FORMULA):
        text = "'" + text
    if any(mark in text for mark in ',"\r\n') or (text == "" and width == 1):
        return '"' + text.replace('"', '""') + '"'
    return text


def _written(text: str, path: "str | Path | None") -> str:
    if path is not None:
        Path(path).write_text(text, "utf-8", newline="")
    return text
