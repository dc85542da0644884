"""Library text with other names: still the same program, and no name of the old ones by chance."""

import ast
import keyword
import re
import sys

import numpy as np
import pytest

from experiments.nano.data import build
from experiments.nano.data import renamed as module
from experiments.nano.data.renamed import KEPT, SHARE, pool_of, renamed, shape
from experiments.nano.data.split import Source

needs_3_11 = pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="the corpus is Python 3.11")

TEXT = '''
"""Reads a value: read_value and _MAX_SIZE, Reader and HTTPReader."""
from __future__ import annotations
import os.path, json as js
from codecs import open_again
_MAX_SIZE = 10  # value of _MAX_SIZE; not MAX_SIZE
class Reader(HTTPReader):
    __slots__ = ()
    def read_value(self, value, *, n=1, key_2=None):
        size = {"value": value, "n": n}
        print(f"{{value}} {value!r:>{n}n} \\n{size['value']} ")
        return f"{self.read_value(key_2)=} {key_2:%n} {f'{n}n'} {value[n:n]}"
def again(x_of, value):
    print(os.path.join(value, b"read_value\\nkey_2"), js.dumps(x_of).lower(), sep="", file=x_of)
    try: return Reader().read_value(value=value, n=-1) != x_of
    except ValueError as n: raise n
'''
POOL = pool_of(
    [
        "alpha = beta = gamma = delta = omega = theta = sigma = 1\nq = u = v = w = k = m = g = 1\n"
        "one_a = two_b = three_c = four_d = five_e = six_f = 1\n"
        "_BIG_A = _BIG_B = BIG_C = BIG_D = BIG = 1\n"
        "class Alpha(BetaGamma, DeltaX, URLAlpha, Omega): pass\n"
    ]
)


def mapping(before, after):
    """{old name: new name} of two texts that are one program; asserts that they are."""
    a, b = (list(ast.walk(ast.parse(text))) for text in (before, after))
    assert [type(node) for node in a] == [type(node) for node in b]
    found = {}

    def see(x, y):
        assert type(x) is type(y), (x, y)
        if isinstance(x, list):
            assert len(x) == len(y)
            any(see(*pair) for pair in zip(x, y))
        elif isinstance(x, str):
            parts, others = x.split("."), y.split(".")  # of modules
            assert len(parts) == len(others)
            for old, new in zip(parts, others):
                assert found.setdefault(old, new) == new, (old, new, found[old])
        elif not isinstance(x, ast.AST):
            assert x == y or x != x

    for x, y in zip(a, b):
        for name in x._fields:
            if not isinstance(x, ast.Constant):
                see(getattr(x, name), getattr(y, name))
            elif not isinstance(x.value, str | bytes):
                assert x.value == y.value
            else:  # word for word
                see_words(str(x.value), str(y.value))
    return found


def see_words(x, y):
    assert re.sub(r"\w+", "", x) == re.sub(r"\w+", "", y), (x, y)
    for old, new in zip(re.findall(r"\w+", x), re.findall(r"\w+", y)):
        assert old == new or re.search(r"[_\d]|[a-z][A-Z]|[A-Z]{2}[a-z]", old), (old, new)


def check(before, after):
    """The laws of a renamed text; returns its new names."""
    new = {old: name for old, name in mapping(before, after).items() if old != name}
    words = set(re.findall(r"\w+", before))
    assert len(set(new.values())) == len(new), "two names became one"
    for old, name in new.items():
        assert shape(old) == shape(name) and name not in words, (old, name)
        for x in (old, name):
            assert not keyword.iskeyword(x) and x not in KEPT
            assert not (x.startswith("__") and x.endswith("__"))
    return new


@pytest.fixture
def everything(monkeypatch):
    monkeypatch.setattr(module, "SHARE", (1.0, 1.0))


@needs_3_11
def test_every_place_of_a_name(everything):
    after = renamed(TEXT, POOL, np.random.default_rng(0))
    new = check(TEXT, after)
    every = (
        "_MAX_SIZE Reader HTTPReader read_value value n key_2 size again x_of open_again file sep"
    )
    # two words more than the pool has
    assert set(new) | {"dumps"} >= set(every.split()) - {"sep"} and "self" not in new
    g = {old: new.get(old, old) for old in every.split()}
    said = f'a value: {g["read_value"]} and {g["_MAX_SIZE"]}, Reader and {g["HTTPReader"]}."""'
    assert said in after
    assert f"# value of {g['_MAX_SIZE']}; not MAX_SIZE" in after
    v, n, k = g["value"], g["n"], g["key_2"]
    assert f"""f"{{{{value}}}} {{{v}!r:>{{{n}}}n}} \\n{{{g["size"]}['value']}} """ in after
    assert (
        f"""f"{{self.{g["read_value"]}({k})=}} {{{k}:%n}} {{f'{{{n}}}n'}} {{{v}[{n}:{n}]}}\""""
        in after
    )
    assert f'b"{g["read_value"]}\\n{k}"' in after
    for same in ("from __future__ import annotations", "import os.path, json as", "__slots__"):
        assert same in after
    assert ".lower()" in after and "ValueError as" in after and "os.path.join(" in after


def test_names_are_drawn_by_the_seed_and_by_document():
    one, again, other = (renamed(TEXT, POOL, np.random.default_rng(s)) for s in (1, 1, 2))
    assert one == again != other


def test_a_share_of_the_names_is_renamed():
    text = "".join(f"name_{i} = 1\n" for i in range(200))
    pool = pool_of(["".join(f"other_{i} = 1\n" for i in range(900))])
    rng = np.random.default_rng(0)
    shares = [renamed(text, pool, rng).count("other_") / 200 for _ in range(60)]
    assert min(shares) >= SHARE[0] and max(shares) <= SHARE[1]
    assert min(shares) < 0.35 and max(shares) > 0.85


def test_a_name_that_the_pool_cannot_replace_stays(everything):
    pool = pool_of(["a = b = c = 1\n"])
    after = renamed("a = i + j + k + m + some_name\n", pool, np.random.default_rng(0))
    names = re.findall(r"\w+", after)
    assert len(set(names)) == 6 and {"b", "c"} < set(names) and names[-1] == "some_name"
    assert len({"a", "i", "j", "k", "m"} & set(names)) == 3


def test_a_new_name_is_no_word_of_the_text(everything):
    """Of code, comment or string, and none that something else of the text is renamed to."""
    text = "one = two  # three\nprint('four', self.six)\n"
    pool = pool_of(["one = two = three = four = five = six = seven = eight = 1\n"])
    for seed in range(20):
        names = re.findall(r"\w+", renamed(text, pool, np.random.default_rng(seed)))
        assert names[2:5] == ["three", "print", "four"]
        new = {names[0], names[1], names[6]}
        assert len(new) == 3 and {"five", "seven", "eight"} == new


@pytest.mark.parametrize("text", ["print `x`\n", "x = (\n", "if x:\n    y\n  z\n", "x = '\n", ""])
def test_what_is_no_python_3_stays(text, everything):
    assert renamed(text, POOL, np.random.default_rng(0)) == text


def test_common_names_come_more_often_by_the_root_of_their_count(everything):
    pool = pool_of(["common\n" * 81 + "rarely\n" * 9])
    drawn = [renamed("word = 1\n", pool, np.random.default_rng(i)) for i in range(2000)]
    share = sum("common" in text for text in drawn) / len(drawn)
    assert abs(share - 0.75) < 0.04


def test_the_pool_has_no_modules_and_nothing_that_knows_its_meaning():
    names = {x for names, _ in pool_of([TEXT]).values() for x in names}
    assert {"value", "key_2", "Reader", "n", "js"} <= names
    assert not names & {"os", "path", "json", "self", "print", "lower", "join", "__slots__", "def"}


@needs_3_11
@pytest.mark.parametrize("every", [36, pytest.param(1, marks=pytest.mark.slow)])
def test_library_files_stay_the_same_programs(real, every):
    files = [f for f in real[1].library if f.module != build.TABLES][::every]
    changed = 0
    for file, copy in zip(files, build.renamed_copies(files, 1), strict=True):
        assert file.path == copy.path
        changed += bool(check(file.text, copy.text))
    assert changed > 0.9 * len(files)


def test_copies_are_whole_one_after_another_and_differ():
    files = [Source(f"{i}.py", TEXT + f"\nname_{i} = 1\n") for i in range(3)]
    copies = build.renamed_copies(files)
    assert [copy.path for copy in copies] == ["0.py", "1.py", "2.py"] * build.COPIES
    assert copies == build.renamed_copies(files)
    assert len({copy.text for copy in copies}) == len(copies)
