"""The nano model as it ships: complete, small, of the official layout, and really trained.

Without its weights every test here fails, and says so: a checkout or a package that lacks them is
broken. The figures of the model card come from experiments/nano; the bounds here are loose.
"""

import inspect
import time
import zipfile
from collections import Counter

import pytest
import torch

import deepinfer as di
from deepinfer.checkpoint import nano
from deepinfer.checkpoint.header import CheckpointError
from deepinfer.checkpoint.reader import Checkpoint
from deepinfer.engine import weights
from experiments.nano.config import nano_config

MOST_BYTES = 24_000_000
LENGTH = 4096  # of the sequences that it was trained on


@pytest.fixture(scope="module")
def checkpoint():
    return Checkpoint.open(nano.folder())


@pytest.fixture(scope="module")
def eng():
    """In float64, where drafts change no token."""
    start = time.perf_counter()
    made = di.Engine.nano(dtype="float64")
    seconds, threads = time.perf_counter() - start, torch.get_num_threads()
    print(f"\nEngine.nano: {seconds:.2f} s on {threads} thread(s)")
    with made:
        yield made


def file(path: str) -> di.data.Text:
    return next(text for text in di.data.heldout(None) if text.path == path)


# -- the files ------------------------------------------------------------------------------------


def test_every_file_is_there_and_together_they_are_small():
    folder = nano.folder()
    assert sum((folder / name).stat().st_size for name in nano.FILES) <= MOST_BYTES
    assert {p.name for p in folder.glob("*.safetensors")} == {
        name for name in nano.FILES if name.endswith(".safetensors")
    }


def test_a_missing_file_is_named_with_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setattr(nano.resources, "files", lambda name: tmp_path)
    for name in (*nano.FILES[1:], nano.SUMS):
        (tmp_path / name).touch()
    with pytest.raises(FileNotFoundError, match="lacks config.json; install the package again"):
        di.Engine.nano()


@pytest.fixture
def copy(tmp_path, monkeypatch):
    """The folder's files again, which Engine.nano then loads; links, so one is to be replaced."""
    for name in (*nano.FILES, nano.SUMS):
        (tmp_path / name).symlink_to(nano.folder() / name)
    monkeypatch.setattr(nano.resources, "files", lambda name: tmp_path)
    assert nano.verified() == tmp_path
    return tmp_path


def rewritten(path, data):
    path.unlink()
    path.write_bytes(data)


@pytest.mark.parametrize("name", nano.FILES)
def test_a_changed_file_never_loads(copy, name):
    """64 bytes in the middle: values that would load, of any file."""
    data = bytearray((copy / name).read_bytes())
    middle = len(data) // 2
    size = min(64, len(data) - middle)
    data[middle : middle + size] = b"\0" * size
    rewritten(copy / name, data)
    with pytest.raises(CheckpointError, match=f"damaged: .*{name} has .*install the package again"):
        di.Engine.nano()


@pytest.mark.parametrize("change", ["empty", "half", "binary"])
def test_changed_sums_are_no_way_round(copy, change):
    whole = (copy / nano.SUMS).read_bytes()
    changed = {"empty": b"", "half": whole[: len(whole) // 2], "binary": b"\xff" + whole}
    rewritten(copy / nano.SUMS, changed[change])
    with pytest.raises(CheckpointError, match="nano model is damaged: .*sha256.txt beside it says"):
        di.Engine.nano()
    (copy / nano.SUMS).unlink()
    with pytest.raises(FileNotFoundError, match="lacks sha256.txt"):
        di.Engine.nano()


def test_the_sums_are_those_that_sha256sum_reads():
    lines = (nano.folder() / nano.SUMS).read_text("ascii").splitlines()
    assert lines == [f"{digest}  {name}" for name, digest in nano.sums(nano.folder()).items()]


def test_an_archive_is_refused(tmp_path, monkeypatch):
    with zipfile.ZipFile(tmp_path / "site.zip", "w") as archive:
        for name in nano.FILES:
            archive.writestr(f"nano/{name}", "")
    inside = zipfile.Path(tmp_path / "site.zip", "nano/")
    monkeypatch.setattr(nano.resources, "files", lambda name: inside)
    with pytest.raises(FileNotFoundError, match="no folder on disk.*install the package unpacked"):
        di.Engine.nano()


# -- the architecture -----------------------------------------------------------------------------


def test_every_mechanism_of_the_release_is_there(checkpoint):
    c = checkpoint.config
    assert c.compress_ratios == (0, 0, 2, 2, 2, 2, *[1] * 6, 0, 0, 0)
    assert c.kv_source_layer_ids == (2, 4, 6) and c.index_source_layer_ids == (2, 4, 6, 8, 10)
    encoder = ["window", "window", "full", "reuse", "full", "reuse"]
    decoder = ["full", "reuse", "reindex", "reuse", "reindex", "reuse"]
    assert list(c.roles) == [*encoder, *decoder, "draft", "draft", "draft"]
    assert [i for i in range(12) if c.uses_candidates(i)] == [8, 10]
    assert (c.sliding_window, c.hc_mult, c.num_attention_heads) == (64, 4, 8)
    assert (c.n_routed_experts, c.num_experts_per_tok, c.n_shared_experts) == (64, 6, 1)
    assert c.engram_layer_ids == (1, 4) and c.engram_max_ngram_size == 4
    assert (len(c.draft_layers), c.max_draft) == (3, 5) and c.dspark_markov_rank == 64
    assert c.dspark_target_layer_ids == (9, 10, 11)
    assert c.quantization is not None


def test_selection_and_candidates_leave_something_out(checkpoint):
    """Long before the end of a training sequence: else they would be there in name only."""
    c = checkpoint.config
    candidates = c.candidate_topk_blocks * c.candidate_block_size
    visible = LENGTH // c.ratio(c.candidate_source_layer_id)
    assert c.sliding_window < LENGTH // 8
    assert c.index_topk < candidates < visible // 8


def test_storage_is_the_official_one(checkpoint):
    held = Counter(entry.dtype for entry in checkpoint.entries.values())
    assert set(held) == {"F32", "BF16", "F8_E4M3", "F8_E8M0", "I8"}
    assert held["I8"] == 3 * (12 * 64 + 3 * checkpoint.config.dspark_n_routed_experts)
    assert held["F8_E8M0"] == held["I8"] + held["F8_E4M3"]  # each of them has its scales
    experts = checkpoint.read("layers.7.ffn.experts.63.w2.weight")
    assert experts.kind == "fp4" and not checkpoint.unread


def test_it_is_what_the_recipe_describes(checkpoint, eng):
    assert nano_config(eng.tokenizer) == checkpoint.config


# -- the tokenizer --------------------------------------------------------------------------------


def test_text_comes_back_from_its_tokens(eng):
    texts = [*di.data.heldout(None), *di.data.prose(None)]
    for text in [*texts, "", " ", "\t\r\n\x00", "if x:\n\tπ = 'é 漢字 😀'\n\n\n", "<s> <pad>"]:
        ids = eng.encode(text)
        assert ids[0] == 0 and min(ids[1:], default=5) >= 5, "no text spells a special token"
        assert max(ids) < eng.config.vocab_size and eng.decode(ids) == text


def test_special_tokens_have_the_config_s_ids(eng):
    c = eng.config
    ids = (c.bos_token_id, c.eos_token_id, c.pad_token_id, c.dspark_noise_token_id)
    assert (*ids, c.image_token_id) == (0, 1, 2, 3, 4)
    assert eng.decode([0, 1, 2, 3, 4]) == ""
    assert eng.tokenizer.get_vocab_size(with_added_tokens=True) == c.vocab_size == 4096


# -- what it has learned --------------------------------------------------------------------------


def test_it_predicts_python_that_it_has_not_seen():
    """Bits per byte of two held-out files against xz's on both, in float32."""
    texts = [file("linecache.py"), file("json/scanner.py")]
    with di.Engine.nano(dtype="float32") as eng:
        scores = eng.score(texts)
    bits = [s.bits_per_byte * len(t.encode()) for s, t in zip(scores, texts, strict=True)]
    mine, xz = sum(bits) / sum(len(t.encode()) for t in texts), di.data.xz_bits_per_byte(texts)
    print(f"\n{mine:.3f} bits per byte, xz {xz:.3f}")
    assert mine < 0.8 * xz


def test_drafts_are_accepted_and_change_no_token(eng):
    prompts = [
        text[: text.index(upto) + len(upto)]
        for text, upto in [
            (file("linecache.py"), "def getline(filename, lineno, module_globals=None):"),
            (file("_weakrefset.py"), "    def __len__(self):"),
        ]
    ]
    greedy = di.SamplingParams(temperature=0, max_tokens=40)
    sampled = di.SamplingParams(temperature=0.8, seed=3, max_tokens=20)
    plain = eng.generate([*prompts, prompts[0]], [greedy, greedy, sampled])
    with eng.with_(verifier=di.verifier.Fixed(5)) as drafting:
        drafted = drafting.generate([*prompts, prompts[0]], [greedy, greedy, sampled])
    plain.raise_for_errors(), drafted.raise_for_errors()
    assert [c.token_ids for c in drafted] == [c.token_ids for c in plain]
    # but for the prompt's step, which always gives one
    steps = sum(len({t.step for t in c.steps}) - 1 for c in drafted[:2])
    rate = sum(len(c.token_ids) - 1 for c in drafted[:2]) / steps
    print(f"\n{rate:.2f} tokens per step")
    assert rate > 1.5


# -- the engine -----------------------------------------------------------------------------------


def test_it_is_an_engine_like_any_other(eng, checkpoint):
    assert eng.source == "nano" and eng.exact and repr(eng).startswith("Engine of nano: exact\n")
    assert eng.fingerprint == weights.fingerprint(checkpoint)
    assert eng.config == checkpoint.config and eng.model.dtype == torch.float64
    makers = di.Engine.nano, di.Engine.from_pretrained
    mine, others = (inspect.signature(maker).parameters for maker in makers)
    assert list(mine) == [name for name in others if name not in ("path", "download", "verify")]
    with pytest.raises(TypeError, match="did you mean 'fidelity'"):
        di.Engine.nano(fidelty=0)


def test_two_engines_share_nothing_that_changes(eng):
    with di.Engine.nano(dtype="float64", verifier="off") as other:
        assert other.fingerprint == eng.fingerprint and other.tokenizer is not eng.tokenizer
        mine, others = (dict(e.model.named_parameters()) for e in (eng, other))
        places = {p.untyped_storage().data_ptr() for p in mine.values()}
        assert not places & {p.untyped_storage().data_ptr() for p in others.values()}
        kept = {name: p.clone() for name, p in mine.items()}
        for p in others.values():
            p.zero_()
        assert all(torch.equal(kept[name], p) for name, p in mine.items())
    fresh = Checkpoint.open(nano.folder()).read("head.weight", torch.float64)
    assert torch.equal(fresh, kept["head.weight"])  # nor does the file change


def test_it_stays_as_it_is_stored_when_asked():
    with di.Engine.nano(keep_quantised=True) as small:
        held = sum(row["bytes"] for row in small.memory if row["part"] == "weights")
        assert held < MOST_BYTES * 1.2  # BF16 weights are float32 here
        assert len(small.generate("import ", max_tokens=2, temperature=0)[0].token_ids) == 2


def test_too_little_memory_is_refused_before_any_is_taken(monkeypatch):
    monkeypatch.setattr(weights, "available_bytes", lambda device: 50_000_000)
    monkeypatch.setattr(weights, "from_checkpoint", None)
    with pytest.raises(MemoryError, match=r"nano in torch.float32 needs 1\d\d,\d{3},\d{3} bytes"):
        di.Engine.nano(dtype="float32")
