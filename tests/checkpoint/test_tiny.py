"""The tiny model: deterministic, in the official layout, with a tokenizer of its own."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deepinfer.checkpoint.loader import load
from deepinfer.checkpoint.reader import Checkpoint
from deepinfer.checkpoint.tiny import tiny_checkpoint, tiny_config, tiny_state, write_tiny
from deepinfer.checkpoint.tiny_tokenizer import IMAGE_ID, NOISE_ID, _data, tiny_tokenizer, train
from deepinfer.model.engram_hash import check_map, check_rows, token_map
from deepinfer.model.stack import Model


@pytest.fixture(scope="module")
def tiny():
    return tiny_state(0)


def test_config_has_every_role():
    config = tiny_config()
    assert set(config.roles) == {"window", "full", "reuse", "reindex", "draft"}
    assert (config.first_decoder_layer, config.num_layers, config.ring_length) == (5, 10, 22)
    assert [i for i in range(10) if config.uses_candidates(i)] == [7, 9]
    check_rows(config)


def test_state_depends_on_the_seed_only(tiny):
    _, state, _ = tiny
    again, other = tiny_state(0)[1], tiny_state(1)[1]
    assert all(torch.equal(state[name], again[name]) for name in state)
    assert not any(torch.equal(state[name], other[name]) for name in state)
    assert all(value.dtype == torch.float32 for value in state.values())


def test_no_two_weights_are_alike(tiny):
    _, state, _ = tiny
    seen = {tuple(value.flatten()[:3].tolist()) for value in state.values()}
    assert len(seen) == len(state)


def test_random_numbers_are_those_of_numpy(tiny):
    """A sentinel: other machines must draw the same weights."""
    _, state, _ = tiny
    expected = np.array([1.1211644, 1.2410021, 1.0936018], dtype=np.float32)
    assert np.allclose(state["layers.3.attn_norm.weight"][:3].numpy(), expected, atol=1e-6)


def test_written_and_in_memory_are_one(tmp_path):
    written = Checkpoint.open(write_tiny(tmp_path / "tiny", seed=4))
    assert written.config == tiny_config()
    models = []
    for source in (written, tiny_checkpoint(4)):
        with torch.device("meta"):
            models.append(Model(source.config))
        load(models[-1], source, dtype=torch.float32)
    for (name, a), b in zip(models[0].named_parameters(), models[1].parameters()):
        assert torch.equal(a, b), name


def test_without_quantisation(tmp_path):
    checkpoint = Checkpoint.open(write_tiny(tmp_path / "tiny", quantised=False))
    assert checkpoint.config == tiny_config(quantised=False)
    assert {entry.dtype for entry in checkpoint.entries.values()} == {"BF16", "F32"}


# -- tokenizer ------------------------------------------------------------------------------------


def test_shipped_merges_are_those_of_the_shipped_text():
    merges = train()
    assert [tuple(line.split(" ")) for line in _data("tiny_merges.txt").splitlines()] == merges
    assert len(merges) == NOISE_ID - 3 - 256


def test_training_takes_the_most_frequent_pair_first_in_order():
    assert train("abab cdcd cdcd", 3 + 256 + 2) == [("c", "d"), ("a", "b")]
    assert train("cd ab", 3 + 256 + 1) == [("a", "b")]  # among equals the first in string order
    with pytest.raises(ValueError, match="1 merges"):
        train("ab", 1000)


def test_named_tokens():
    tokenizer, config = tiny_tokenizer(), tiny_config()
    assert tokenizer.get_vocab_size() == config.vocab_size == 1024
    assert tokenizer.id_to_token(config.bos_token_id) == "<｜begin▁of▁sentence｜>"
    assert tokenizer.id_to_token(config.eos_token_id) == "<｜end▁of▁sentence｜>"
    assert tokenizer.id_to_token(config.pad_token_id) == "<｜▁pad▁｜>"
    assert (config.dspark_noise_token_id, config.image_token_id) == (NOISE_ID, IMAGE_ID)
    assert tokenizer.id_to_token(IMAGE_ID) == "<｜deepseek_image｜>"
    assert len({tokenizer.id_to_token(i) for i in range(1024)}) == 1024
    parts = [tokenizer.token_to_id(token) for token in ("a", "<｜User｜>", "b")]
    assert tokenizer.encode("a<｜User｜>b").ids == parts


def test_its_text_is_compressed():
    text = _data("tiny_text.txt")
    assert len(tiny_tokenizer().encode(text).ids) < len(text) / 3


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_tokenizer()


@given(text=st.text(max_size=60))
def test_any_text_round_trips(tokenizer, text):
    ids = tokenizer.encode(text).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert all(0 <= token < 1024 for token in ids)


def test_its_classes_fit_the_config():
    classes = token_map(tiny_tokenizer())
    check_map(tiny_config(), classes)
    ids = tiny_tokenizer().token_to_id
    assert classes[ids("The")] == classes[ids("Ġthe")] != classes[ids("Ġ")]
