"""What decides an engine's results is in its fingerprint and provenance, or refused at load."""

import json
import shutil
import time

import numpy as np
import pytest
import torch
from tokenizers import Regex, normalizers, pre_tokenizers, processors

import deepinfer as di
from deepinfer.checkpoint.hub import locate, snapshot
from deepinfer.checkpoint.reader import CheckpointError
from deepinfer.checkpoint.tiny import write_tiny
from deepinfer.engine import weights
from deepinfer.engine.weight_edits import WeightEdits

TEXT = "Hello, World! " * 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny(tmp_path_factory.mktemp("identity") / "tiny")


@pytest.fixture(scope="module")
def eng(folder):
    return di.Engine.from_pretrained(folder, max_model_len=256)


@pytest.fixture
def other(folder, tmp_path):
    """Makes a copy of the checkpoint with another tokenizer."""

    def make(change):
        mine = tmp_path / "changed"
        shutil.copytree(folder, mine, copy_function=shutil.copy)
        tokenizer = tokenizer_of(mine)
        change(tokenizer)
        tokenizer.save(str(mine / "tokenizer.json"))
        return mine

    return make


def tokenizer_of(folder):
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def load(folder, **settings):
    return di.Engine.from_pretrained(folder, max_model_len=256, **settings)


# -- the tokenizer --------------------------------------------------------------------------------


def test_stored_truncation_and_padding_are_switched_off(eng, other, caplog):
    def change(tokenizer):
        tokenizer.enable_truncation(8)
        tokenizer.enable_padding(length=64)

    found = load(other(change))
    assert found.encode(TEXT) == eng.encode(TEXT) and len(eng.encode(TEXT)) > 9
    assert found.encode("a") == eng.encode("a")
    said = [record.message for record in caplog.records]
    assert len(said) == 1 and "truncation" in said[0] and "padding" in said[0]
    assert found.fingerprint == eng.fingerprint  # they change nothing any more


def test_a_user_s_tokenizer_changes_no_engine(eng):
    before, sibling = eng.encode(TEXT), eng.with_()
    mine = eng.tokenizer
    mine.enable_truncation(8)
    mine.normalizer = normalizers.Lowercase()
    assert len(mine.encode(TEXT).ids) == 8
    assert eng.encode(TEXT) == sibling.encode(TEXT) == before
    assert eng.decode(before) == TEXT


def test_the_tokenizer_is_in_the_identity_and_its_additions_are_named(eng, other):
    def change(tokenizer):
        tokenizer.normalizer = normalizers.Sequence([normalizers.Lowercase()])
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<bos> $A", special_tokens=[("<bos>", 0)]
        )

    found = load(other(change))
    assert found.encode(TEXT) == eng.encode(TEXT.lower()) != eng.encode(TEXT)  # one bos, ours
    assert found.fingerprint != eng.fingerprint
    facts, mine = found.kernels.provenance, eng.kernels.provenance
    assert facts["weights"] != mine["weights"]
    assert facts["tokenizer"] == "normalizer Lowercase, post_processor TemplateProcessing"
    assert mine["tokenizer"] is None


def test_a_tokenizer_that_panics_costs_its_own_request(eng, other):
    def change(tokenizer):
        slow = pre_tokenizers.Split(Regex(r"(?:a|a|aa)+(?=b)"), "isolated")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([slow, tokenizer.pre_tokenizer])

    found = load(other(change))
    with pytest.raises(ValueError, match="cannot encode this text .*retry-limit"):
        found.add("a" * 40)
    bad, good = found.generate(["a" * 40, "good"], max_tokens=2, temperature=0)
    assert isinstance(bad.error, ValueError) and len(good.token_ids) == 2


@pytest.mark.parametrize(
    "make",
    [lambda: "ab" * 5_000_000, lambda: [5] * 8_700_000, lambda: np.full(8_700_000, 5)],
    ids=["text", "ids", "array"],
)
def test_a_prompt_that_cannot_fit_is_refused_before_it_is_read(eng, make):
    prompt = make()
    began = time.process_time()
    error = eng.generate([prompt], max_tokens=1)[0].error
    assert isinstance(error, ValueError) and "takes at most 255 (max_model_len=256" in str(error)
    assert time.process_time() - began < 1


# -- weights that change --------------------------------------------------------------------------

EDITS = {
    "in place": lambda model: model.head.weight.mul_(1.25),
    "a state": lambda model: model.load_state_dict(
        {k: v.flip(0) if k == "embed.weight" else v for k, v in model.state_dict().items()}
    ),
    "assigned": lambda model: model.load_state_dict(
        {k: v * 1.25 for k, v in model.state_dict().items()}, assign=True
    ),
    "new data": lambda model: setattr(model.head.weight, "data", model.head.weight.data * 1.25),
}


@pytest.mark.parametrize("edit", EDITS)
def test_edited_weights_serve_no_old_page_and_say_so(edit):
    eng = di.Engine.tiny(prefix_cache=True, dtype="float64", max_model_len=512)
    plain = eng.with_(prefix_cache=False)
    ids = [7 + i % 50 for i in range(300)]
    ask = dict(max_tokens=2, temperature=0.0)
    eng.generate([ids], **ask)
    assert eng.generate([ids], **ask)[0].cached_tokens > 0
    before, table = eng.fingerprint, eng.kernels
    assert "+edited" not in before
    with torch.no_grad():
        EDITS[edit](eng.model)
    after, fresh = eng.generate([ids], **ask)[0], plain.generate([ids], **ask)[0]
    assert after.cached_tokens == 0
    assert after.token_ids == fresh.token_ids
    assert after.logprobs == pytest.approx(fresh.logprobs, abs=1e-9)
    assert eng.fingerprint == plain.fingerprint == f"{before}+edited"
    assert eng.kernels.provenance["weights"] == eng.fingerprint
    assert eng.stats.table().provenance["weights"] == eng.fingerprint
    assert table.provenance["weights"] == before  # what was measured before stays so
    assert eng.generate([ids], **ask)[0].cached_tokens > 0  # forgotten exactly once
    generation = eng.runtime.prefix_cache.index.generation
    eng.generate([ids], **ask)
    assert eng.runtime.prefix_cache.index.generation == generation
    with torch.no_grad():
        eng.model.norm.weight.add_(1)
    assert eng.fingerprint == f"{before}+edited2"


def test_running_edits_no_weight(eng):
    before = eng.fingerprint
    eng.generate(["a", "b"], max_tokens=3)
    eng.score("some text")
    assert eng.fingerprint == before
    with torch.inference_mode():
        model = torch.nn.Linear(2, 2)
    assert WeightEdits(model, "x").fingerprint == "x"


def test_a_reader_holds_no_weight():
    model = torch.nn.Linear(2, 2)
    edits = WeightEdits(model, "x")
    read = edits.reader()
    with torch.no_grad():
        model.weight.zero_()
    assert read() == "x+edited"
    del edits, model
    assert read() == "x+edited"


def test_a_large_file_is_sampled_and_says_so(folder, monkeypatch):
    whole = load(folder).fingerprint
    monkeypatch.setattr(weights, "WHOLE", 1000)
    monkeypatch.setattr(weights, "SAMPLED", 100)
    sampled = load(folder)
    assert sampled.fingerprint.endswith("+sampled") and "+sampled" not in whole
    assert sampled.kernels.provenance["weights"] == sampled.fingerprint
    assert load(folder, verify=True).fingerprint == whole


# -- files beside config.json ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "file, content, said",
    [
        ("generation_config.json", {"eos_token_id": 5}, "eos_token_id: 5; config.json has eos"),
        ("generation_config.json", {"eos_token_id": [1, 5]}, r"eos_token_id: \[1, 5\]; config"),
        ("generation_config.json", {"bos_token_id": 9}, "bos_token_id: 9; config.json has bos"),
        (
            "tokenizer_config.json",
            {"eos_token": "a"},
            "eos_token 'a': that is .*has eos_token_id 1",
        ),
        (
            "tokenizer_config.json",
            {"eos_token": {"content": "<no>"}},
            "eos_token .<no>.: which tokenizer.json does not have",
        ),
        ("generation_config.json", [], "holds a list"),
    ],
)
def test_another_end_token_beside_the_config_is_refused(folder, tmp_path, file, content, said):
    mine = shutil.copytree(folder, tmp_path / "mine", copy_function=shutil.copy)
    (mine / file).write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=f"{file}: {said}"):
        load(mine)


def test_sampling_defaults_beside_the_config_are_named(folder, tmp_path, caplog, eng):
    mine = shutil.copytree(folder, tmp_path / "mine", copy_function=shutil.copy)
    content = dict(eos_token_id=[1], temperature=0.3, top_p=1.0, do_sample=True, top_k=20)
    (mine / "generation_config.json").write_text(json.dumps(content | {"_from_model_config": True}))
    found = load(mine)
    said = [record.message for record in caplog.records]
    assert len(said) == 1 and "not applied: temperature 0.3, top_k 20; give them as" in said[0]
    assert found.fingerprint == eng.fingerprint
    caplog.clear()
    (mine / "generation_config.json").write_text(json.dumps(dict(temperature=1.0, bos_token_id=0)))
    load(mine)
    assert not caplog.records


# -- the hub cache --------------------------------------------------------------------------------


@pytest.mark.parametrize("ref", ["../../elsewhere", "..", "/etc", "a/b", "a\x00b", "\xff", ""])
def test_a_reference_that_leads_out_of_the_cache_is_refused(tmp_path, monkeypatch, ref):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    cached = tmp_path / "hub" / "models--owner--name"
    for place in (cached / "elsewhere", cached / "snapshots" / "abc", cached / "refs"):
        place.mkdir(parents=True)
        (place / "config.json").write_text("{}")
    (cached / "refs" / "main").write_bytes(ref.encode("latin-1"))
    with pytest.raises(ValueError, match="refs/main.*names no snapshot"):
        locate("owner/name")
    (cached / "refs" / "main").write_text("abc\n")
    assert locate("owner/name") == cached / "snapshots" / "abc" == snapshot(cached)
