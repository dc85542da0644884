"""Table: what it holds comes back equal, what it hides it says."""

import csv
import enum
import io
import math
import re

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given

import deepinfer as di
from deepinfer.display import html
from deepinfer.display.numbers import fmt, size
from deepinfer.engine.provenance import of_engine
from deepinfer.tables import provenance

cells = st.one_of(
    st.integers(), st.floats(), st.text(), st.booleans(), st.none(), st.integers(-(2**80), 2**80)
)
tables = st.lists(st.text(min_size=1), unique=True, min_size=1, max_size=4).flatmap(
    lambda names: st.lists(st.fixed_dictionaries(dict.fromkeys(names, cells)), max_size=5).map(
        lambda rows: di.Table(rows, names, title="a title", provenance={"seed": 7})
    )
)


def same(a, b) -> bool:
    if isinstance(a, float) and isinstance(b, float) and math.isnan(a):
        return math.isnan(b)
    return type(a) is type(b) and a == b and str(a) == str(b)  # str: -0.0 is not 0.0


@given(tables)
def test_json_reads_back_equal(table):
    back = di.Table.from_json(table.to_json())
    assert back == table
    assert back.columns == table.columns and back.provenance == table.provenance
    for row, original in zip(back, table, strict=True):
        assert all(same(row[name], original[name]) for name in table.columns)


@given(tables)
def test_csv_has_every_row(table):
    head, *rows = csv.reader(io.StringIO(table.to_csv(), newline=""))
    assert tuple(name.removeprefix("'") for name in head) == table.columns
    for row, original in zip(rows, table, strict=True):
        for text, value in zip(row, original.values(), strict=True):
            if isinstance(value, str):
                assert not text.startswith(("=", "+", "-", "@", "\t", "\r"))
                assert text.removeprefix("'") == value
            else:
                assert text == ("" if value is None else str(value))


def test_csv_texts_are_no_formulas():
    rows = [{"text": text, "n": -1.5} for text in ("=1+1", "+1", "-1", "@x", "\t=1", "\r=1", "'x")]
    head, *lines = csv.reader(io.StringIO(di.Table(rows).to_csv(), newline=""))
    assert [line[0] for line in lines] == ["'" + row["text"] for row in rows]
    assert head == ["text", "n"] and {line[1] for line in lines} == {"-1.5"}  # numbers stay
    assert di.Table([{"=A1": 1}]).to_csv().splitlines()[0] == "'=A1"


def test_a_column_compares_row_by_row():
    table = di.Table(
        [{"source": s, "kl": k} for s, k in (("draft", 0.5), ("sampled", None), ("draft", 0.1))]
    )
    assert table[table["source"] == "draft"].rows == [table[0], table[2]]
    assert table[table["source"] != "draft"].rows == [table[1]]
    assert table.where(table["kl"] > 0.2).rows == [table[0]]
    assert table[(table["source"] == "draft") & ~(table["kl"] > 0.2)].rows == [table[2]]
    assert table[(table["kl"] <= 0.1) | (table["source"] == "sampled")].rows == table[1:].rows
    assert table.where(table["kl"] < 1, source="draft")["kl"] == [0.5, 0.1]
    assert table[table["kl"].isin([0.1, None])].rows == table[1:].rows
    assert table[table["kl"] == None].rows == [table[1]]  # noqa: E711
    assert table["kl"] == [0.5, None, 0.1] and table["kl"] != [1] and table["kl"] == table["kl"]
    assert table[table["kl"] == np.float64(0.5)].rows == [table[0]]
    with pytest.raises(ValueError, match="one bool a row"):
        bool(table["source"] == "draft")
    with pytest.raises(TypeError, match="one bool says nothing about 3 rows"):
        table[True]
    with pytest.raises(ValueError, match="a mask of 2 rows for a table of 3"):
        table[[True, False]]
    with pytest.raises(TypeError, match="one bool a row"):
        table[[0, 1, 2]]


def test_sort_puts_what_has_no_order_last():
    table = di.Table([{"x": x, "i": i} for i, x in enumerate((2, None, 1, math.nan, 2))])
    assert table.sort("x")["i"] == [2, 0, 4, 1, 3]
    assert table.sort("x", descending=True)["i"] == [0, 4, 2, 1, 3]
    assert table.sort("x", "i", descending=True)["i"] == [4, 0, 2, 3, 1]
    with pytest.raises(TypeError, match="column 'x' holds texts and numbers"):
        di.Table([{"x": 1}, {"x": "a"}]).sort("x")
    with pytest.raises(KeyError, match="no column 'y'"):
        table.sort("y")


def test_a_table_of_a_data_frame():
    import pandas

    table = di.Table([{"x": 1, "y": "a"}, {"x": 2, "y": None}], title="t", provenance={"k": 1})
    back = di.Table(table.to_pandas())
    assert back == table and back.provenance == table.provenance
    grouped = di.Table(pandas.DataFrame({"g": ["a", "b", "a"], "n": [1, 2, 3]}).groupby("g").sum())
    assert grouped.rows == [{"g": "a", "n": 4}, {"g": "b", "n": 2}]
    missing = di.Table(pandas.DataFrame({"n": pandas.array([1, None], dtype="Int64")}))
    assert missing["n"] == [1, None] and type(missing[0]["n"]) is int
    assert math.isnan(di.Table(pandas.DataFrame({"x": [math.nan]}))[0]["x"])
    with pytest.raises(ValueError, match="named twice"):
        di.Table(pandas.DataFrame([[1, 2]], columns=["a", "a"]))
    assert len(di.Table(pandas.DataFrame(columns=["a"]))) == 0


def test_equality_tells_types_apart():
    one, one_float, true = (di.Table([{"x": v}]) for v in (1, 1.0, True))
    assert one != one_float and one != true and one == di.Table([{"x": 1}])
    assert di.Table([{"x": math.nan}]) == di.Table([{"x": math.nan}])


def test_json_in_a_file_and_what_is_no_table(tmp_path):
    table = di.Table([{"x": math.inf, "y": "é\n"}])
    path = tmp_path / "t.json"
    assert path.write_text(table.to_json(), "utf-8") and di.Table.from_json(path) == table
    table.to_json(path), table.to_csv(tmp_path / "t.csv")
    assert di.Table.from_json(path) == table
    assert (tmp_path / "t.csv").read_text("utf-8") == table.to_csv()
    with pytest.raises(ValueError, match="not a table"):
        di.Table.from_json('{"rows": []}')
    with pytest.raises(ValueError, match="not a whole table: it has no columns, title, prov"):
        di.Table.from_json('{"format": "deepinfer.Table/1"}')


def test_cells_are_plain_values():
    class Colour(str, enum.Enum):
        RED = "red"

    row = {"a": np.float32(0.5), "b": torch.tensor(3), "c": np.bool_(True), "d": Colour.RED}
    assert di.Table([row])[0] == {"a": 0.5, "b": 3, "c": True, "d": "red"}
    assert [type(v) for v in di.Table([row])[0].values()] == [float, int, bool, str]
    with pytest.raises(TypeError, match="column 'x', row 1.*list"):
        di.Table([{"x": 1}, {"x": [1, 2]}])


def test_columns_are_those_of_the_rows_or_as_told():
    table = di.Table([{"b": 1}, {"a": 2}])
    assert table.columns == ("b", "a") and table["a"] == [None, 2]
    assert di.Table([{"b": 1}], ["a", "b"]).columns == ("a", "b")
    with pytest.raises(ValueError, match=r"\['b'\]"):
        di.Table([{"b": 1}], ["a"])
    with pytest.raises(KeyError, match="no column 'c'.*b, a"):
        table["c"]


def test_selecting_keeps_title_and_provenance():
    table = di.Table(
        [{"x": i, "even": i % 2 == 0} for i in range(6)], title="t", provenance={"k": 1}
    )
    even = table.where(even=True)
    assert even["x"] == [0, 2, 4] and even.title == "t" and even.provenance["k"] == 1
    assert table.where(lambda row: row["x"] > 4)["x"] == [5]
    assert table[4:]["x"] == [4, 5] and table[-1]["x"] == 5


def test_pandas_has_the_same_values():
    table = di.Table([{"x": 1, "y": 0.1}, {"x": 2, "y": math.nan}], title="t")
    frame = table.to_pandas()
    assert list(frame.columns) == ["x", "y"] and frame["x"].tolist() == [1, 2]
    assert frame["y"][0] == 0.1 and math.isnan(frame["y"][1]) and frame.attrs["title"] == "t"


def test_what_is_hidden_is_said():
    table = di.Table([{"x": i} for i in range(57)])
    for shown in (repr(table), table._repr_html_()):
        assert "37 of 57 rows hidden" in shown
    assert "hidden" not in repr(table[:20])
    assert re.search(r"^\s*19$", repr(table), re.M) and not re.search(r"^\s*20$", repr(table), re.M)
    wide = di.Table([{f"column {i}": "v" * 20 for i in range(12)}])
    assert "columns not shown for width: column 5" in repr(wide)
    assert max(len(line) for line in repr(wide).splitlines()[:-1]) <= 110
    assert repr(di.Table()) == "no rows" and "no rows" in repr(di.Table(columns=["x"]))


def test_repr_is_the_same_on_every_machine():
    """Neither form shows provenance, an address or a time."""
    table = di.Table([{"x": 1 / 3}], provenance={"secret": "only in exports"})
    assert "only in exports" in table.to_json()
    for shown in (repr(table), table._repr_html_()):
        assert "0.333" in shown and "0.3333" not in shown
        assert "only in exports" not in shown and "0x" not in shown


def test_text_hides_nothing():
    table = di.Table([{f"column {i}": n for i in range(40)} for n in range(57)], title="all")
    text = table.to_text()
    assert "hidden" not in text and "not shown" not in text and "column 39" in text
    assert len(text.splitlines()) == 57 + 3 and "37 of 57 rows hidden" in repr(table)


def test_blanks_of_text_cells_are_kept_in_html():
    shown = di.Table([{"token": " the", "n": 1, "said": "two words"}])._repr_html_()
    cells = dict(re.findall(r'<td style="([^"]*)">([^<]*)</td>', shown)[::-1])
    kept = {text for style, text in cells.items() if "white-space:pre" in style}
    assert kept == {" the"} and len(cells) == 3
    for text in ("a  b", "a ", "a\nb", "\t"):
        assert "white-space:pre" in html.table(["x"], [[text]])


def test_hidden_rows_are_it_or_them():
    for n, shows in ((21, "1 of 21 rows hidden; t[20:] shows it"), (22, "t[20:] shows them")):
        assert shows in repr(di.Table([{"a": i} for i in range(n)]))


@pytest.mark.parametrize("words", [3, 30, 60])
def test_a_plot_s_title_stays_in_the_figure(words):
    import matplotlib

    matplotlib.use("agg")
    ax = di.Table([{"x": 1, "y": 2}], title=" ".join(["wWmeasured"] * words)).plot("x", "y")
    ax.figure.canvas.draw()
    box, whole = ax.title.get_window_extent(), ax.figure.bbox
    assert box.x0 >= 0 and box.x1 <= whole.x1 and box.y1 <= whole.y1


def test_html_escapes_what_it_is_given():
    shown = di.Table([{"<b>": "<script>alert('x')</script>"}], title="a & b")._repr_html_()
    assert "<script" not in shown and "&lt;script&gt;" in shown
    assert "a &amp; b" in shown and "&lt;b&gt;" in shown
    assert html.tag("p", "<", html.Html("<i>"), class_="c", title='"') == (
        '<p class="c" title="&quot;">&lt;<i></p>'
    )


def test_plot_draws_the_rows(monkeypatch):
    import matplotlib

    matplotlib.use("agg")
    rows = [{"n": n, "rate": n / 10 + k, "kind": str(k)} for k in (0, 1) for n in (3, 1, 2)]
    table = di.Table([*rows, {"n": 9, "rate": None, "kind": "0"}], title="t")
    ax = table.plot("n", "rate", by="kind")
    assert [line.get_label() for line in ax.lines] == ["0", "1"]
    assert ax.lines[0].get_xdata().tolist() == [1, 2, 3]  # in order of x; None is left out
    np.testing.assert_allclose(ax.lines[1].get_ydata(), [1.1, 1.2, 1.3])
    assert (ax.get_xlabel(), ax.get_ylabel(), ax.get_title()) == ("n", "rate", "t")
    assert ax.lines[0].get_color() == html.PALETTE[0]
    assert table.plot("n", "rate", by="kind", ax=ax) is ax
    bars = table.plot("kind", "rate")
    assert [t.get_text() for t in bars.get_xticklabels()] == ["0", "1"] and len(bars.patches) == 6
    many = di.Table([{"x": 1, "y": i, "g": i} for i in range(11)]).plot("x", "y", by="g")
    assert len(many.lines) == 8 and "8 of 11 shown" in many.get_legend().get_title().get_text()


def test_plots_leave_no_figure_open(tmp_path):
    import matplotlib
    import matplotlib.pyplot as plt

    matplotlib.use("agg")
    before = plt.get_fignums()
    for _ in range(25):
        ax = di.Table([{"x": 1, "y": 2}]).plot("x", "y")
    assert plt.get_fignums() == before
    ax.figure.savefig(tmp_path / "one.png")
    assert (tmp_path / "one.png").read_bytes()[:4] == b"\x89PNG"


def test_provenance_names_no_machine():
    import getpass
    import socket

    facts = di.Table(provenance={"seed": 3, "weights": "ab12"}).provenance
    assert {"version", "commit", "torch", "python", "device", "threads"} <= set(facts)
    assert facts["seed"] == 3 and facts["threads"] == torch.get_num_threads()
    text = str(facts)
    assert "/" not in text.replace("+changes", "") and socket.gethostname() not in text
    assert getpass.getuser() not in text or getpass.getuser() in di.__version__
    assert facts["commit"] is None or re.fullmatch(r"[0-9a-f]{40}(\+changes)?", facts["commit"])


def test_provenance_of_an_engine_tells_what_matters_apart():
    base = di.Engine.tiny(seed=0)
    facts = of_engine(base)
    assert facts == of_engine(base.with_())
    table = di.Table([{"x": 1}], provenance=facts)
    assert di.Table.from_json(table.to_json()) == table and table.provenance["device"] == "cpu"
    for other, name in (
        (di.Engine.tiny(seed=1), "weights"),
        (base.with_(attention="dense"), "slots"),
        (base.with_(max_num_seqs=2), "settings"),
        (base.with_(seed=5), "seed"),
    ):
        changed = of_engine(other)
        assert [key for key in facts if facts[key] != changed[key]] == [name]


def test_an_installed_package_has_no_commit(tmp_path, monkeypatch):
    """A venv inside somebody's repository must not report that repository's commit."""
    (tmp_path / ".git").mkdir()
    place = tmp_path / "lib" / "deepinfer" / "tables" / "provenance.py"
    monkeypatch.setattr(provenance, "__file__", str(place))
    assert provenance.commit.__wrapped__() is None


@pytest.mark.parametrize(
    ("x", "text"),
    [(0.123456, "0.123"), (1234.5, "1230"), (999.6, "1000"), (0.0, "0"), (-0.0, "0"), (7, "7")]
    + [(1e6, "1e+06"), (9.996e-5, "0.0001"), (2.5e-7, "2.5e-07"), (math.nan, "nan"), (True, "True")]
    + [(-math.inf, "-inf"), (None, "None"), ([1, 2.0004], "[1, 2]"), (12345678, "12345678")]
    + [(torch.tensor(0.1), "0.1"), (np.array([1.5, 2.0]), "[1.5, 2]"), ("text", "text")],
)
def test_fmt(x, text):
    assert fmt(x) == text


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_fmt_keeps_three_digits(x):
    assert math.isclose(float(fmt(x)), x, rel_tol=0.00501, abs_tol=1e-320) or abs(x) > 1.79e308


def test_sizes():
    assert [size(n) for n in (0, 999, 1000, 7_200_000_000)] == ["0 B", "999 B", "1 kB", "7.2 GB"]


def test_verdict(capsys):
    di.verdict(torch.tensor(True), "a claim")
    assert capsys.readouterr().out == "ok: a claim\n"
    with pytest.raises(AssertionError, match="does not hold: a claim"):
        di.verdict(np.bool_(False), "a claim")


def test_to_text_cuts_nothing_and_html_sets_long_texts_in_lines():
    """What repr cuts it says; the other forms have every character."""
    long = "a note of several words " * 8 + "with an end"
    table = di.Table([{"name": "x", "note": long, "n": 1}, {"name": "y", "note": "short", "n": 2}])
    assert long in table.to_text() and long in table._repr_html_()
    assert long not in repr(table) and "long texts are cut, .to_text() has them whole" in repr(
        table
    )
    assert "cut" not in repr(table[1:]) and "cut" not in table.to_text()
    cells = [c for c in table._repr_html_().split("<td") if "white-space:normal" in c]
    assert len(cells) == 1 and "a note of several" in cells[0]
    composed = html.table(["x"], [[html.code(long)]])
    assert "white-space:normal" not in composed  # what is composed has its own style
