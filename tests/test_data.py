"""The shipped texts: unharmed, apart, immutable, and cut as asked."""

import copy
import hashlib
import json
import lzma
import pickle
import re
import shutil
import zipfile
from pathlib import Path

import numpy as np
import pytest

import deepinfer as di
from deepinfer.data import texts

FOLDER = Path(texts.__file__).parent
MANIFEST = json.loads((FOLDER / "manifest.json").read_text("utf-8"))
SETS = {"heldout": di.data.heldout, "dev": di.data.dev, "prose": di.data.prose}
every_set = pytest.mark.parametrize("name", SETS)


@every_set
def test_whole_files_are_what_the_manifest_says(name):
    files = SETS[name](characters=None)
    described = MANIFEST["sets"][name]["files"]
    assert [file.path for file in files] == [entry["path"] for entry in described]
    for file, entry in zip(files, described, strict=True):
        data = file.encode("utf-8")
        assert len(data) == entry["bytes"] and file.module == entry["module"]
        assert hashlib.sha256(data).hexdigest() == file.sha256 == entry["sha256"]
        assert "PSF" in file.licence and file.offset == 0 and "\r" not in file


def test_sets_have_nothing_in_common():
    parts = {name: texts(characters=None) for name, texts in SETS.items()}
    for key in ("path", "sha256", "module"):
        seen = [getattr(file, key) for name in parts for file in parts[name]]
        once = seen if key != "module" else [m for p in parts for m in {f.module for f in parts[p]}]
        assert len(once) == len(set(once)), key
    assert len({file.module for file in parts["heldout"]}) >= 26
    code = [file.path for file in parts["heldout"] + parts["dev"]]
    assert [path for path in code if re.search("(^|/)(test|tests)/", path)] == []


def test_readme_and_folder_agree_with_the_manifest():
    readme = (FOLDER / "README.md").read_text("utf-8")
    for name, described in MANIFEST["sets"].items():
        row = next(line for line in readme.splitlines() if line.startswith(f"| `{name}`"))
        assert described["sha256"] in row and f"{described['bytes']:,}" in row
        whole = SETS[name](characters=None)
        shown = float(row.split("|")[5])
        assert di.data.xz_bits_per_byte(whole) == pytest.approx(shown, rel=2e-3)
        assert f" {len(described['files'])} |" in row
    assert MANIFEST["source"] in readme
    licence = (FOLDER / "LICENSE-PYTHON.txt").read_text("utf-8")
    assert "PYTHON SOFTWARE FOUNDATION LICENSE VERSION 2" in licence
    assert sum(file.stat().st_size for file in FOLDER.glob("*.*")) < 400_000


@every_set
def test_one_passage_a_module_by_default(name):
    files, passages = SETS[name](characters=None), SETS[name]()
    assert [p.module for p in passages] == list(dict.fromkeys(file.module for file in files))
    for passage in passages:
        of_module = [file for file in files if file.module == passage.module]
        largest = max(of_module, key=len)
        assert passage.path == largest.path and largest.startswith(passage)
        assert passage == largest or (passage.endswith("\n") and len(passage) >= 1500)
        assert len(passage.rpartition("\n")[0].rpartition("\n")[0]) < 1500  # no line too many


@pytest.mark.parametrize("characters", [700, 3000, 7000])
def test_many_passages_do_not_overlap_and_are_long_enough(characters):
    files = {file.path: file for file in di.data.heldout(characters=None)}
    passages = di.data.heldout(characters, count=64)
    assert len(passages) == 64 == len({(p.path, p.offset) for p in passages})
    taken = {}
    for p in passages:
        end = p.offset + len(p)
        assert files[p.path][p.offset : end] == p and len(p) >= characters
        assert p.offset == 0 or files[p.path][p.offset - 1] == "\n"
        assert not taken.setdefault(p.path, set()) & set(range(p.offset, end))
        taken[p.path] |= set(range(p.offset, end))
    assert len({p.module for p in passages}) >= 24


def test_rounds_give_every_module_its_turn():
    first = di.data.heldout(characters=2000)
    many = di.data.heldout(2000, count=len(first) + 3)
    assert many[: len(first)] == first
    assert [p.module for p in many[len(first) :]] == [p.module for p in first[:3]]
    assert di.data.heldout(2000, count=0) == []


def test_wrong_wishes_are_refused():
    with pytest.raises(ValueError, match=r"heldout\(characters=7000, count=9999\): it has \d+ p"):
        di.data.heldout(characters=7000, count=9999)
    with pytest.raises(ValueError, match="characters=None asks for whole files"):
        di.data.dev(None, count=3)
    for characters, count in ((0, None), (True, None), (1.5, None), (100, -1), (100, "3")):
        with pytest.raises(ValueError, match="whole numbers"):
            di.data.heldout(characters, count)
    with pytest.raises(ValueError, match="it has 0 passages"):
        di.data.prose(characters=10**6, count=1)
    with pytest.raises(ValueError, match="no text"):
        di.data.xz_bits_per_byte([])


def test_whole_numbers_of_any_kind_are_taken():
    want = di.data.heldout(700, count=30)
    assert di.data.heldout(np.int64(700), count=np.uint8(30)) == want
    assert di.data.heldout(np.array(1500)) == di.data.heldout()
    for wrong in (np.float64(700), np.bool_(True), "700", np.int64(0)):
        with pytest.raises(ValueError, match="whole numbers"):
            di.data.heldout(wrong)


def test_a_text_is_a_string_that_cannot_change():
    text = di.data.heldout()[1]
    with pytest.raises(AttributeError, match="immutable"):
        text.module = "other"
    pickled = [pickle.loads(pickle.dumps(text, n)) for n in range(pickle.HIGHEST_PROTOCOL + 1)]
    assert len(pickled) >= 6
    for twin in (*pickled, copy.copy(text), copy.deepcopy(text), copy.deepcopy([text])[0]):
        assert twin == text == str(text) and type(twin) is type(text)
        assert all(getattr(twin, name) == getattr(text, name) for name in di.data.Text.__slots__)
    assert type(str(text)) is str and json.loads(json.dumps([text])) == [str(text)]
    second = di.data.heldout(1000, count=56)[-1]
    assert second.offset and f"from {second.offset:,}" in repr(second)
    assert text.path in repr(text) and len(repr(text)) < 120
    di.data.heldout().clear()
    assert len(di.data.heldout()) >= 26  # callers share no list


def test_an_engine_takes_texts_as_prompts():
    eng = di.Engine.tiny()
    passages = di.data.heldout(characters=60)[:2]
    assert len(eng.generate(passages, max_tokens=2)) == 2
    assert eng.encode(passages[0]) == eng.encode(str(passages[0]))


def test_xz_is_the_shipped_file_s_size():
    whole = di.data.dev(characters=None)
    size = sum(len(text.encode()) for text in whole)
    stored = (FOLDER / "dev.txt.xz").stat().st_size * 8 / size
    assert di.data.xz_bits_per_byte(whole) == pytest.approx(stored, rel=2e-3)  # liblzma versions
    assert di.data.xz_bits_per_byte(["é"]) == di.data.xz_bits_per_byte(iter(["é"]))


@pytest.fixture
def damaged(tmp_path, monkeypatch):
    """A copy of the folder, which the readers read."""
    shutil.copytree(FOLDER, tmp_path / "data")
    monkeypatch.setattr(texts.resources, "files", lambda package: tmp_path / "data")
    assert di.data.dev() == di.data.dev(1500)
    return tmp_path / "data"


def test_a_changed_text_is_noticed(damaged):
    file = damaged / "dev.txt.xz"
    whole = lzma.decompress(file.read_bytes())
    file.write_bytes(lzma.compress(whole.replace(b"median", b"mediaN", 1)))
    with pytest.raises(RuntimeError, match="dev.txt.xz: its SHA-256 is .*install the package"):
        di.data.dev()
    assert di.data.heldout()  # the other sets are whole


def test_a_cut_file_is_noticed(damaged):
    file = damaged / "dev.txt.xz"
    file.write_bytes(file.read_bytes()[:-2000])
    with pytest.raises(RuntimeError, match="dev.txt.xz"):
        di.data.dev()


def test_a_changed_file_list_is_noticed(damaged):
    stored = json.loads((damaged / "manifest.json").read_text("utf-8"))
    stored["sets"]["dev"]["files"][1]["bytes"] -= 1
    (damaged / "manifest.json").write_text(json.dumps(stored))
    with pytest.raises(RuntimeError, match=stored["sets"]["dev"]["files"][1]["path"]):
        di.data.dev()


@pytest.mark.parametrize("file", ["dev.txt.xz", "manifest.json"])
def test_a_missing_file_is_named_with_what_to_do(damaged, file):
    (damaged / file).unlink()
    with pytest.raises(FileNotFoundError, match=f"data.dev reads {file}, .*no such file; install"):
        di.data.dev()
    (damaged / file).mkdir()
    with pytest.raises(RuntimeError, match=f"data.dev: .*{file}: it cannot be read.*git checkout"):
        di.data.dev()


def lose(place, key):
    """A change of the manifest: the key is gone, or is of another kind."""
    return lambda whole: place(whole).pop(key), lambda whole: place(whole).update({key: None})


def sets(whole):
    return whole["sets"]


def dev(whole):
    return whole["sets"]["dev"]


def file(whole):
    return whole["sets"]["dev"]["files"][1]


CHANGES = [
    *lose(lambda w: w, "sets"),
    *lose(lambda w: w, "licence"),
    *lose(sets, "dev"),
    *lose(dev, "files"),
    *lose(dev, "sha256"),
    *lose(file, "path"),
    *lose(file, "bytes"),
    *lose(file, "module"),
    *lose(file, "sha256"),
    lambda whole: dev(whole)["files"].pop(),
]


@pytest.mark.parametrize("change", CHANGES)
def test_a_manifest_that_lacks_something_is_one_clear_error(damaged, change):
    whole = json.loads((damaged / "manifest.json").read_text("utf-8"))
    change(whole)
    (damaged / "manifest.json").write_text(json.dumps(whole))
    with pytest.raises(RuntimeError, match="di.data.dev: deepinfer/data/manifest.json: .*install"):
        di.data.dev()


@pytest.mark.parametrize("stored", ["", "[]", "{", "12", '{"sets": 3}'])
def test_a_manifest_that_is_cut_is_one_clear_error(damaged, stored):
    whole = (damaged / "manifest.json").read_text("utf-8")
    for text in (stored, whole[: len(whole) // 2]):
        (damaged / "manifest.json").write_text(text)
        with pytest.raises(RuntimeError, match="manifest.json: .*the shipped text is damaged"):
            di.data.dev()


def test_texts_are_read_from_a_package_in_an_archive(tmp_path, monkeypatch):
    """And a file that it lacks is named as in a folder."""
    for name in ("whole", "part"):
        with zipfile.ZipFile(tmp_path / f"{name}.zip", "w") as archive:
            for path in FOLDER.glob("*.*"):
                if name == "whole" or path.name != "dev.txt.xz":
                    archive.write(path, f"data/{path.name}")
    want = di.data.dev()
    for name in ("whole", "part"):
        inside = zipfile.Path(tmp_path / f"{name}.zip", "data/")
        monkeypatch.setattr(texts.resources, "files", lambda package, inside=inside: inside)
        if name == "whole":
            assert di.data.dev() == want
        else:
            with pytest.raises(FileNotFoundError, match="data.dev reads dev.txt.xz.*part.zip"):
                di.data.dev()
