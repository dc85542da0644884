"""The nano report on the tiny model: what is scored, routed, printed and kept."""

import json

import pytest
import torch
from torch import Tensor

from deepinfer.checkpoint.reader import Checkpoint
from deepinfer.checkpoint.tiny import write_tiny
from deepinfer.checkpoint.tiny_tokenizer import tiny_tokenizer
from experiments.nano.config import small_config
from experiments.nano.report import evaluation, findings, quality, routing, sections, texts
from experiments.nano.train import weights

BOS = 0

# --------------------------------------------------------------------------------------- scoring


def test_documents_spell_their_text(eng, docs):
    assert [d.module for d in docs] == ["m0", "m1"]
    assert [d.nbytes for d in docs] == [len(docs[0].data), 2 * len(docs[0].data)]
    cut = texts.firsts(eng.tokenizer, docs, 10)
    assert all(len(d.ids) == 10 for d in cut)
    assert cut[0].data.decode() == eng.decode(cut[0].ids)


def test_a_tokenizer_that_loses_text_is_refused(eng):
    class Lossy:
        decoder = None

        def encode(self, text, **_):
            return eng.tokenizer.encode(text.lower().strip(), add_special_tokens=False)

        def __getattr__(self, name):
            return getattr(eng.tokenizer, name)

    with pytest.raises(ValueError, match="tokens spell"):
        texts.documents(Lossy(), ["  Walk  "])


def test_every_token_is_scored_once_in_cold_pieces(eng, docs):
    found = texts.score(eng.logits, BOS, docs, 48)
    for doc, s in zip(docs, found):
        want = []
        for a in range(0, len(doc.ids), 48):
            part = list(doc.ids[a : a + 48])
            rows = eng.logits([BOS, *part]).log_softmax(-1)
            want += [-float(rows[i, t]) for i, t in enumerate(part)]
        assert s.nats.tolist() == pytest.approx(want, rel=1e-9)
        assert s.position.tolist() == [i % 48 for i in range(len(doc.ids))]
        assert s.length.tolist()[-1] == len(doc.ids) - (len(doc.ids) - 1) // 48 * 48
    whole = eng.score([docs[0].data.decode()])[0]
    one = texts.score(eng.logits, BOS, docs[:1], 256)
    assert float(one[0].nats.sum()) == pytest.approx(whole.nats)


def test_overlapping_pieces_give_both_figures(eng, docs):
    for doc in docs:
        cold, over = quality.halves(eng, BOS, doc, 32)
        want = texts.score(eng.logits, BOS, [doc], 32)[0]
        assert torch.allclose(cold.nats, want.nats) and not over.nats.isnan().any()
        for i in {0, 31, 32, 40, len(doc.ids) - 1}:  # its window starts 16..31 tokens before
            first = max(0, (i // 16 - 1) * 16)
            row = eng.logits([BOS, *doc.ids[first:i]])[-1].log_softmax(-1)
            assert float(over.nats[i]) == pytest.approx(-float(row[doc.ids[i]]))


def test_paths_agree(eng, docs):
    ids = [BOS, *docs[1].ids[:90]]
    want = eng.logits(ids, chunks=[1] * len(ids))
    for path in (evaluation.uncached(eng), evaluation.chunked(eng, 7), evaluation.training(eng)):
        assert torch.allclose(path(ids), want, atol=1e-8)


# --------------------------------------------------------------------------------------- routing


def test_routing_is_of_the_text_alone(eng, docs):
    scored, routed = routing.scored_and_routed(eng, BOS, docs, 64)
    want = texts.score(eng.logits, BOS, docs, 64)
    for doc, s, w, r in zip(docs, scored, want, routed):
        assert torch.allclose(s.nats, w.nats)
        cuts = list(texts.pieces(len(doc.ids), 64))
        assert r.ids.shape[:2] == (eng.config.num_hidden_layers, len(doc.ids) - len(cuts))
        assert int(r.ids.min()) >= 0
    with eng.trace("layers.5.ffn.experts") as t:
        eng.logits([BOS, *docs[0].ids[:-1]])
    ids = t["layers.5.ffn.experts"].as_subclass(Tensor)[1:]
    if len(docs[0].ids) <= 64:
        assert torch.equal(routed[0].ids[5].long(), ids)


# --------------------------------------------------------------------------------------- command


@pytest.fixture(scope="module")
def folders(tmp_path_factory, docs):
    text = docs[0].data.decode()
    root = tmp_path_factory.mktemp("report")
    stored, plain = write_tiny(root / "stored"), write_tiny(root / "plain", quantised=False)
    for name, count in (("heldout", 9), ("prose", 2), ("dev", 3)):
        (root / name).mkdir()
        for i in range(count):
            line = f"class {name.title()}{i}:\n    size = {i * 37}\n\n"
            (root / name / f"m{i}.py").write_text(line + text[i:])
    return root, stored, plain


def run(folders, *more):
    root, stored, plain = folders
    texts_ = [str(root / x) for x in ("heldout", "prose", "dev")]
    return sections.main(
        [
            "--checkpoint",
            str(stored),
            "--unquantised",
            str(plain),
            "--quick",
            "--out",
            str(root / "out.json"),
            "--texts",
            *texts_,
            *more,
        ]
    )


@pytest.mark.slow
def test_the_command_measures_everything_and_its_file_reads_back(folders, capsys):
    assert run(folders, "--second-seed", str(folders[1])) == 0
    printed = capsys.readouterr().out
    tables = findings.read(folders[0] / "out.json")
    assert set(tables) == {
        "quality.held-out",
        "quality.rounding",
        "quality.position",
        "quality.older",
        "quality.context",
        "quality.prose",
        "paths",
        "routing.layers",
        "routing.skew",
        "ablations",
        "drafts.accepted",
        "drafts.distinct",
        "drafts.conditional",
        "acceptance.length",
        "acceptance.position",
        "calibration",
        "ablations.markov",
        "summary",
    }
    for table in tables.values():
        assert table.to_text() in printed and table.provenance["weights"]
    for row in tables["summary"]:
        if row["second_seed"] is not None:  # the same checkpoint: no spread at all
            assert row["second_seed"] == row["measured"]
    assert str(folders[0]) not in (folders[0] / "out.json").read_text()  # no path of a machine


def test_the_command_runs_one_section(folders, capsys):
    assert run(folders, "--only", "paths") == 0
    assert list(findings.read(folders[0] / "out.json")) == ["paths"]
    assert "must agree" in capsys.readouterr().out


def test_a_missing_checkpoint_is_one_line(folders, capsys):
    root = folders[0]
    bad = sections.main(["--checkpoint", str(root / "nowhere"), "--unquantised", str(root)])
    assert bad == 2 and len(capsys.readouterr().err.splitlines()) == 1


def test_a_control_with_the_rounded_weights_is_refused(folders, capsys, monkeypatch, tmp_path):
    """That of a drafter stage: the backbone is the stored one, the drafter is not."""
    root, stored, plain = folders
    config = small_config(tiny_tokenizer())
    state = weights.initial(config, 0)
    weights.write_both(tmp_path / "one", config, state, tiny_tokenizer())
    rounded = Checkpoint.open(tmp_path / "one" / "stored")
    other = weights.initial(config, 1)
    after = {
        name: other[name] if name.startswith("mtp.") else rounded.read(name, torch.float32)
        for name in state
    }
    weights.write_both(tmp_path / "two", config, after, tiny_tokenizer())

    def loaded(*_):
        raise AssertionError("it began")

    monkeypatch.setattr(sections, "load", loaded)
    ship = str(tmp_path / "two" / "stored")
    pairs = ((ship, tmp_path / "two" / "unquantised"), (ship, ship), (str(stored), stored))
    for checkpoint, control in pairs:
        assert run(folders, "--checkpoint", checkpoint, "--unquantised", str(control)) == 2
        said = capsys.readouterr().err
        assert f"--unquantised {control} has the rounded weights" in said
        assert "`unquantised` of the backbone stage" in said and len(said.splitlines()) == 1
    for checkpoint, control in ((ship, tmp_path / "one" / "unquantised"), (str(stored), plain)):
        with pytest.raises(AssertionError, match="it began"):
            run(folders, "--checkpoint", checkpoint, "--unquantised", str(control))


def test_what_would_fail_later_is_refused_at_once(folders, capsys, monkeypatch, tmp_path):
    root = folders[0]

    def loaded(*_):
        raise AssertionError("it began")

    monkeypatch.setattr(sections, "load", loaded)

    def refused(why, *more):
        assert run(folders, *more) == 2
        said = capsys.readouterr().err
        assert why in said and len(said.splitlines()) == 1

    refused("jobs have one thread each", "--jobs", "2", "--threads", "2")
    refused("is for a CPU", "--jobs", "2", "--device", "cuda")
    refused("--second-seed", "--second-seed", str(root))
    refused("--checkpoint", "--checkpoint", str(root))
    refused("a file in a folder that is there", "--out", str(root / "nowhere" / "out.json"))
    refused("a file in a folder that is there", "--out", str(root))
    (tmp_path / "hollow").mkdir()
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "a.py").touch()
    (tmp_path / "binary").mkdir()
    (tmp_path / "binary" / "b.py").write_bytes(b"\xff\xfe\x00")
    for name, why in (
        ("nowhere", "no such folder"),
        ("hollow", "0 files, none with text"),
        ("empty", "1 files, none with text"),
        ("binary", "b.py is not UTF-8"),
    ):
        for place in range(3):
            three = [str(root / x) for x in ("heldout", "prose", "dev")]
            three[place] = str(tmp_path / name)
            refused(why, "--texts", *three)
    with pytest.raises(AssertionError, match="it began"):
        run(folders)


@pytest.mark.parametrize("option", ["--jobs", "--threads"])
@pytest.mark.parametrize("count", ["0", "-1", "1.5", "many", "1025", "9" * 5000])
def test_counts_are_whole_numbers_from_one_on(folders, capsys, option, count):
    with pytest.raises(SystemExit) as stop:
        run(folders, f"{option}={count}")
    assert stop.value.code == 2 and "from 1 to 1024" in capsys.readouterr().err


def test_a_file_that_is_no_report_is_refused(tmp_path):
    (tmp_path / "x.json").write_text(json.dumps({"format": "other"}))
    with pytest.raises(ValueError, match="no report"):
        findings.read(tmp_path / "x.json")
