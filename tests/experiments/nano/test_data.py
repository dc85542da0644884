"""The nano corpus: what judges the model is not in its training text, on any machine the same."""

import hashlib
import json
import lzma
import platform
import re
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from tokenizers import Tokenizer

from deepinfer import data as shipped
from deepinfer.model.engram_hash import token_map
from experiments.nano.data import build, ship
from experiments.nano.data.overlap import WORDS, shared_text
from experiments.nano.data.prose import prose
from experiments.nano.data.split import (
    NEAR,
    NEAR_RUNS,
    UNIT_BYTES,
    Source,
    sources,
    split,
    standard_library,
)
from experiments.nano.data.vocabulary import SPECIAL, VOCAB, train_tokenizer

PARTS = ("library", "tests", "dev", "heldout")
SHIPPED = "3.11.7"  # the Python whose library the package ships parts of
needs_3_11 = pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="the corpus is Python 3.11")


def words(name: str, count: int) -> str:
    """Text of its own: words that no other name's text has."""
    return "\n".join(f"{name}_{i} = {name}_{i % 7}_{i // 7}" for i in range(count)) + "\n"


@pytest.fixture
def fake(tmp_path):
    """A small standard library: 16 modules, one near copy of each kind, and their tests."""
    files = {f"m{i}.py": words(f"m{i}", 300) for i in range(12)}
    files |= {"pack/__init__.py": words("pack", 200), "pack/sub.py": words("packsub", 200)}
    files |= {"pack/test/test_sub.py": words("packtest", 100), "tiny.py": "x = 1\n"}
    files |= {"huge.py": words("huge", 9000), "twin.py": files["m3.py"] + words("twin", 100)}
    files |= {"lib2to3/old.py": files["m4.py"], "pydoc_data/topics.py": "topics = {}\n"}
    for name in [f"m{i}" for i in range(12)]:
        files[f"test/test_{name}.py"] = words(f"t{name}", 50)
        files[f"test/test_{name}x.py"] = words(f"tx{name}", 50)
        files[f"test/test_{name}_more/case.py"] = words(f"more{name}", 50)
        files[f"test/{name}_tests.py"] = words(f"tests{name}", 50)
        files[f"test/copy_of_{name}.py"] = files[f"{name}.py"] + words(f"copy{name}", 20)
    files |= {"test/short.py": "y = 1\n", "test/again.py": "y = 1\n"}  # too short to be near
    files |= {"site-packages/extra.py": "x = 2\n", "_sysconfigdata_here.py": "x = 3\n"}
    files["blank.py"] = " \n"
    return lay(tmp_path / "lib", files)


def lay(folder, files):
    for path, text in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(text.encode())
    (folder / "latin.py").write_bytes(b"# \xe9\n")
    return folder


def check_laws(found, parts, shared):
    """What has to hold for any library. shared: the pairs of files that share text."""
    at = {name: {file.path for file in getattr(parts, name)} for name in PARTS}
    everywhere = [path for paths in at.values() for path in paths]
    assert len(everywhere) == len(set(everywhere))
    wanted = {file.path for file in found if file.module != "pydoc_data"}
    assert set(everywhere) | set(parts.dropped) == wanted
    judging, trained = at["dev"] | at["heldout"], at["library"] | at["tests"]
    assert not judging & set(parts.dropped)
    files = {file.path: file for file in found}
    assert not any(files[path].is_test for path in judging | at["library"])
    assert all(files[path].is_test for path in at["tests"])

    side = {}  # modules are whole, and so are units
    for name in ("dev", "heldout"):
        for path in at[name]:
            assert side.setdefault(files[path].module, name) == name
    assert not any(files[path].module in side for path in trained)
    for unit in parts.units:
        assert len({side.get(module) for module in unit}) == 1, unit

    texts = [files[path].text for path in [*trained, *judging]]
    assert len(texts) == len(set(texts)), "exact copies"
    for pair in shared:
        if pair.share >= NEAR and pair.runs >= NEAR_RUNS:
            assert len({pair.a, pair.b} & judging) != 1 or not {pair.a, pair.b} & trained, pair


def test_laws_on_a_small_library(fake):
    found = sources(fake)
    parts = split(found, heldout_modules=4, dev_modules=3)
    check_laws(found, parts, shared_text([(file.path, file.module, file.text) for file in found]))
    names = {name: {file.module for file in getattr(parts, name)} for name in PARTS}
    assert 4 <= len(names["heldout"]) <= 5 and 3 <= len(names["dev"]) <= 4  # whole units
    for never in ("tiny", "huge", "lib2to3", "test"):
        assert never not in names["heldout"] | names["dev"]
    assert ("m3", "twin") in parts.units
    assert not any("m4" in unit for unit in parts.units)  # lib2to3 never judges: no unit with it


@pytest.mark.parametrize("module", [f"m{i}" for i in range(12)])
def test_what_tests_or_copies_a_judging_module_is_not_trained_on(fake, module):
    parts = split(sources(fake), heldout_modules=4, dev_modules=3)
    judging = {file.module for file in parts.heldout + parts.dev}
    trained = {file.path for file in parts.tests}
    own = {f"test/{name}.py" for name in (f"test_{module}", f"{module}_tests", f"copy_of_{module}")}
    own.add(f"test/test_{module}_more/case.py")
    assert own & trained == (set() if module in judging else own)
    assert f"test/test_{module}x.py" in trained  # another module's, by its name
    if module == "m4":
        library = {file.path for file in parts.library}
        assert ("lib2to3/old.py" in library) == (module not in judging)


def test_the_order_is_sha1_and_nothing_else(fake):
    parts = split(sources(fake), heldout_modules=4, dev_modules=3)
    order = list(dict.fromkeys(file.module for file in parts.heldout + parts.dev))
    fits = [f"m{i}" for i in range(12)] + ["pack"]
    wanted = sorted(fits, key=lambda name: hashlib.sha1(name.encode()).hexdigest())
    assert [m for m in order if m != "twin"] == wanted[: len(order) - ("twin" in order)]
    again = split(reversed(sources(fake)), heldout_modules=4, dev_modules=3)
    assert {f.path for f in again.heldout} == {f.path for f in parts.heldout}


def test_sources_leaves_out_what_differs_between_machines(fake):
    paths = [file.path for file in sources(fake)]
    assert paths == sorted(paths)
    for left_out in ("site-packages/extra.py", "_sysconfigdata_here.py", "blank.py", "latin.py"):
        assert left_out not in paths
    (fake / "m0.py").write_bytes((fake / "m0.py").read_bytes().replace(b"\n", b"\r\n"))
    assert "\r" not in sources(fake)[paths.index("m0.py")].text


def test_too_few_modules_are_refused(fake):
    with pytest.raises(ValueError, match="99 modules wanted, and only 14 more"):
        split(sources(fake), heldout_modules=99)


def test_another_python_is_refused_by_name(monkeypatch):
    monkeypatch.setattr(sys, "version_info", SimpleNamespace(major=3, minor=12))
    with pytest.raises(RuntimeError, match="cpython 3.11, and this is cpython 3.12"):
        standard_library()


def test_shared_text_counts_runs():
    a = " ".join(f"a{i}" for i in range(40))
    b = " ".join([*(f"a{i}" for i in range(20)), *(f"b{i}" for i in range(40))])
    (pair,) = shared_text([("x.py", "x", a), ("y.py", "y", b), ("z.py", "z", "a0 a1 a2")])
    assert (pair.a, pair.b, pair.runs) == ("x.py", "y.py", 20 - WORDS + 1)
    assert pair.share == pair.runs / (40 - WORDS + 1)
    assert shared_text([("x/1.py", "x", a), ("x/2.py", "x", a)]) == []  # one module
    many = [(f"{i}.py", str(i), a + f" own{i}") for i in range(6)]
    assert shared_text(many) == [] and len(shared_text(many[:5])) == 10  # a licence header


def test_prose_leaves_out_repetitions_and_library_text(tmp_path):
    topics = {name: words(name, 200) for name in ("one", "two", "three")}
    topics |= {"again": topics["one"] + "more\n", "code": words("code", 200), "short": "x"}
    files = {"pydoc_data/topics.py": f"# made\ntopics = {topics!r}\n", "LICENSE.txt": "free\n"}
    folder = lay(tmp_path, files | {"pdb.py": topics["code"]})
    paths = [file.path.partition("#")[2] for file in prose(folder, sources(folder))]
    first = min(("one", "again"), key=lambda name: hashlib.sha1(name.encode()).hexdigest())
    assert paths[0] == "" and sorted(paths[1:]) == sorted([first, "two", "three"])


# ---------------------------------------------------------------------- the tokenizer and corpus


@pytest.fixture(scope="module")
def tokenizer():
    """Learnt from the shipped dev text, which is enough for 4,096 entries."""
    return train_tokenizer(shipped.dev(characters=None))


def test_special_ids_and_size(tokenizer):
    assert tokenizer.get_vocab_size(with_added_tokens=True) == VOCAB == 4096
    assert [tokenizer.token_to_id(name) for name in SPECIAL] == [0, 1, 2, 3, 4]
    assert set(tokenizer.get_added_tokens_decoder()) == {0, 1, 2, 3, 4}
    assert tokenizer.encode(SPECIAL[0] + "x" + SPECIAL[1]).ids[0::2] == [0, 1]
    classes = token_map(tokenizer)
    assert classes.shape == (VOCAB,) and int(classes.max()) + 1 == classes.unique().numel()


def test_text_survives_the_tokenizer(tokenizer):
    rng = np.random.default_rng(0)
    kinds = ([32, 127], [0, 0x3000], [0x1F300, 0x1F700], [0, 0x110000])
    odd = ["".join(map(chr, rng.integers(*kind, 200))) for kind in kinds for _ in range(20)]
    odd = [text.encode(errors="ignore").decode() for text in odd]  # no lone surrogates
    odd += ["", " ", "\n\n\t x\r\n  \r\n", "a\u0301\u200d\U0001f469\u200d\U0001f4bb", "x" * 5000]
    for text in [*shipped.heldout(None), *shipped.prose(None), *odd]:
        ids = tokenizer.encode(text).ids
        assert tokenizer.decode(ids) == text
        assert not set(ids) & {0, 1, 2, 3, 4}


def test_pieces_keep_line_ends_with_indentation(tokenizer):
    code = "def f(x):\n    if x:\n\n        y = x.name_of[10_000] + ' b'\n"
    pieces = [code[slice(*at)] for _, at in tokenizer.pre_tokenizer.pre_tokenize_str(code)]
    assert "".join(pieces) == code
    wanted = {"\n    ", "\n\n        ", " x", ".name", "_of", "10", "000", " = "}
    assert wanted <= set(pieces), pieces


def test_tokenizer_does_not_depend_on_the_order_of_texts(tokenizer):
    again = train_tokenizer(reversed(shipped.dev(characters=None)))
    assert again.to_str() == tokenizer.to_str()


def test_too_little_text_for_the_vocabulary_is_refused():
    with pytest.raises(ValueError, match="entries, not 4096"):
        train_tokenizer(["too little text"])


def test_documents_stand_between_bos_and_eos(tokenizer):
    texts = ["x = 1\n", "", "def f(): pass\n"]
    ids, offsets = build.encode(tokenizer, texts)
    assert ids.dtype == np.uint16 and offsets.dtype == np.int64 and offsets[-1] == ids.size
    for text, start, end in zip(texts, offsets[:-1], offsets[1:], strict=True):
        document = ids[start:end].tolist()
        assert (document[0], document[-1]) == (0, 1) and tokenizer.decode(document[1:-1]) == text


# ------------------------------------------------------------------------------- what is shipped


@needs_3_11
def test_laws_on_this_library(real):
    found, parts = real
    check_laws(found, parts, parts.near + parts.left)
    sizes = {name: sum(file.size for file in getattr(parts, name)) for name in PARTS}
    units = {name: {file.module for file in getattr(parts, name)} for name in PARTS}
    assert len(units["heldout"]) >= 26 and 450_000 <= sizes["heldout"] <= 600_000
    assert len(units["dev"]) >= 8 and 150_000 <= sizes["dev"] <= 250_000
    by_module = {m: sum(f.size for f in parts.heldout if f.module == m) for m in units["heldout"]}
    assert max(by_module.values()) <= UNIT_BYTES[1]
    own = Source("test/test_json/test_tool.py", "")
    assert own.is_test and "json" in units["heldout"] and own.path in parts.dropped


shipped_python = pytest.mark.skipif(
    platform.python_version() != SHIPPED, reason=f"the shipped texts are of Python {SHIPPED}"
)


@shipped_python
@pytest.mark.parametrize("name", ["heldout", "dev", pytest.param("prose", marks=pytest.mark.slow)])
def test_the_shipped_texts_are_what_the_rule_makes(real, name):
    found, parts = real
    files = prose(standard_library(), found) if name == "prose" else getattr(parts, name)
    stored = json.loads((ship.FOLDER / "manifest.json").read_text("utf-8"))
    made = ship.manifest({name: files}, SHIPPED)
    assert made["source"] == stored["source"] and made["sets"][name] == stored["sets"][name]
    assert [str(text) for text in getattr(shipped, name)(None)] == [file.text for file in files]


@shipped_python
def test_the_readme_names_the_files_that_share_most_text(real):
    found, parts = real
    judging = {file.path for file in parts.heldout + parts.dev}
    trained = {file.path for file in parts.library + parts.tests}
    pairs = [(*sorted((p.a, p.b), key=trained.__contains__), p) for p in parts.left if p.runs >= 20]
    pairs = [(a, b, p) for a, b, p in pairs if a in judging and b in trained]
    readme = (ship.FOLDER / "README.md").read_text("utf-8")
    rows = [f"| `{a}` | `{b}` | {p.runs} | {100 * p.share:.1f} % |" for a, b, p in pairs[:4]]
    assert "\n".join(rows) in readme

    def runs(path):
        text = next(file.text for file in found if file.path == path)
        words = re.findall(r"\w+", text)
        return {tuple(words[i : i + WORDS]) for i in range(len(words) - WORDS + 1)}

    every = [(runs(a), runs(b), a, b) for a, b, _ in pairs]
    own, others, a, b = max(every, key=lambda x: len(x[0] & x[1]) / len(x[0]))
    both = len(own & others)
    said = f"`{a}`: `{b}` has {both} of its {len(own):,} runs, {100 * both / len(own):.0f} %"
    assert said in readme.replace("\n", " ")


@shipped_python
@pytest.mark.slow
def test_the_command_makes_the_corpus(real, tmp_path):
    """What training reads: the documents of each part, in the tokens stored beside them."""
    said = build.make(tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == VOCAB
    with np.load(tmp_path / "corpus.npz") as stored:
        trained = {p: build.without_tables(tokenizer, getattr(real[1], p)) for p in PARTS[:2]}
        renamed = build.renamed_copies(trained["library"])
        texts = {**trained, "renamed": renamed, "dev": real[1].dev}
        assert set(stored) == {f"{p}_{k}" for p in texts for k in ("ids", "offsets")}
        for name, files in texts.items():
            ids, offsets = stored[f"{name}_ids"], stored[f"{name}_offsets"]
            assert offsets.size == len(files) + 1
            for file, start, end in zip(files, offsets[:-1], offsets[1:], strict=True):
                assert ids[start] == 0 and ids[end - 1] == 1
                assert tokenizer.decode(ids[start + 1 : end - 1].tolist()) == file.text
    held = [text.encode() for text in shipped.heldout(None)]
    tokens = sum(len(tokenizer.encode(text.decode()).ids) for text in held)
    assert sum(map(len, held)) / tokens >= 3.3
    assert any(line.startswith("heldout ") for line in said)


def test_shipped_texts_are_not_overwritten_unasked(tmp_path):
    sets = {"heldout": [Source("a.py", "x = 1\n")]}
    ship.write(sets, "3.11.7", "free\n", tmp_path)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    ship.write(sets, "3.11.7", "free\n", tmp_path)
    others = {"heldout": [Source("a.py", "x = 2\n")]}
    with pytest.raises(FileExistsError, match="texts of CPython 3.11.7.*from CPython 3.11.9"):
        ship.write(others, "3.11.9", "free\n", tmp_path)
    assert before == {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    ship.write(others, "3.11.9", "free\n", tmp_path, replace=True)
    assert before != {file.name: file.read_bytes() for file in tmp_path.iterdir()}


def test_a_damaged_text_is_mended(tmp_path):
    """Whatever is wrong with a file, the command makes it whole again, and touches no other."""
    sets = {"heldout": [Source("a.py", "x = 1\n" * 99)], "dev": [Source("b.py", "y = 1\n")]}
    ship.write(sets, "3.11.7", "free\n", tmp_path)
    whole = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    assert set(whole) == {"heldout.txt.xz", "dev.txt.xz", "manifest.json", ship.LICENCE}
    other = lzma.compress(b"x = 2\n")
    for name, data in whole.items():
        if name != "manifest.json":
            for damaged in (b"", data[:-3], data[:4] + b"?" + data[5:], other, None):
                file, before = tmp_path / name, (tmp_path / "manifest.json").stat().st_mtime_ns
                file.unlink() if damaged is None else file.write_bytes(damaged)
                ship.write(sets, "3.11.7", "free\n", tmp_path)
                assert {f.name: f.read_bytes() for f in tmp_path.iterdir()} == whole
                assert (tmp_path / "manifest.json").stat().st_mtime_ns == before
    for damaged in (b"", b"[]", b"{}", whole["manifest.json"][:50]):
        (tmp_path / "manifest.json").write_bytes(damaged)
        with pytest.raises(FileExistsError, match="manifest.json cannot be read.*--replace"):
            ship.write(sets, "3.11.7", "free\n", tmp_path)
        ship.write(sets, "3.11.7", "free\n", tmp_path, replace=True)
        assert {f.name: f.read_bytes() for f in tmp_path.iterdir()} == whole


def test_tables_are_left_out_of_training():
    """Long files of few bytes a token; short ones and code stay."""

    def encode(text):
        return SimpleNamespace(ids=list(range(len(text) // (2 if text.startswith("'") else 4))))

    table = "'\\x00'\n" * 2_000
    files = [
        Source("encodings/cp1.py", table),
        Source("short.py", table[:900]),
        Source("code.py", "def f(x):\n    return x\n" * 2_000),
    ]
    kept = build.without_tables(SimpleNamespace(encode=encode), files)
    assert [file.path for file in kept] == ["short.py", "code.py"]
