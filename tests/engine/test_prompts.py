"""Prompts of every kind: what is an id, and what a bad one costs."""

import dataclasses
import threading

import numpy as np
import pytest
import torch

import deepinfer as di
from deepinfer.engine.sampling_params import SamplingParams
from support.pool import check_empty
from support.small import small_engine, stream

GREEDY = dict(temperature=0.0, max_tokens=4)
IDS = [5, 6, 7, 8]
VOCAB = 97


@pytest.fixture(scope="module")
def eng():
    return small_engine("one layer", vocab=VOCAB, max_model_len=64)


@pytest.fixture(scope="module")
def text(eng):
    return eng.generate(IDS, **GREEDY)[0].token_ids


SAME = {
    "tuple": tuple(IDS),
    "numpy": np.array(IDS),
    "numpy int32": np.array(IDS, dtype=np.int32),
    "list of numpy ints": [np.int64(i) for i in IDS],
    "tensor": torch.tensor(IDS),
    "int32 tensor": torch.tensor(IDS, dtype=torch.int32),
    "list of 0-d tensors": [torch.tensor(i) for i in IDS],
    "range": range(5, 9),
    "generator": (i for i in IDS),
}


@pytest.mark.parametrize("kind", SAME)
def test_ids_come_in_any_sequence(eng, text, kind):
    ids = SAME[kind]
    if kind == "generator":
        ids = list(ids)
        assert eng.generate((i for i in ids), **GREEDY)[0].token_ids == text
    out = eng.generate(ids, **GREEDY)
    assert len(out) == 1 and out[0].token_ids == text and out[0].prompt_token_ids == tuple(IDS)
    assert eng.generate([ids, IDS], **GREEDY)[0].token_ids == text
    assert eng.logits(ids).shape == (4, VOCAB)
    assert all(type(i) is int for i in out[0].prompt_token_ids)


def test_prompts_come_in_any_collection(eng, text):
    for prompts in (
        [IDS, IDS],
        (IDS, IDS),
        np.array([IDS, IDS]),
        torch.tensor([IDS, IDS]),
        (p for p in [IDS, IDS]),
    ):
        assert [c.token_ids for c in eng.generate(prompts, **GREEDY)] == [text, text]
    assert eng.generate([], **GREEDY) == [] == eng.generate(np.zeros((0, 4), int), **GREEDY)


BAD = {
    "negative": ([5, -1], r"prompt\[1\] is -1: token ids of this model are 0..96"),
    "the vocabulary's size": ([VOCAB], r"prompt\[0\] is 97: token ids of this model are 0..96"),
    "huge": ([2**70], "token ids of this model are 0..96"),
    "True": ([5, True], r"prompt\[1\] is True \(bool\): token ids are integers"),
    "False": ([False], "token ids are integers"),
    "numpy bool": (np.array([True, False]), "token ids are integers"),
    "bool tensor": (torch.tensor([True]), "token ids are integers"),
    "float": ([5.0, 6.0], r"prompt\[0\] is 5.0 \(float\): token ids are integers"),
    "nan": ([float("nan")], "token ids are integers"),
    "float tensor": (torch.tensor([5.0]), "token ids are integers"),
    "0-d float tensor inside": ([torch.tensor(5.0)], "token ids are integers"),
    "None inside": ([5, None], "token ids are integers"),
    "nested": ([[5, [6]]], "token ids are integers"),
    "bytes": (b"abc", "bytes"),
    "dict": ({5: 6}, "dict"),
    "set": ({5, 6}, "set"),
    "int": (5, "int"),
    "None": (None, "NoneType"),
    "0-d tensor": (torch.tensor(5), "token ids.*got int 5"),
    "empty array": (np.zeros(0, dtype=np.int64), "empty"),
    "too long": ([5] * 64, r"64 tokens.*at most 63 \(max_model_len=64"),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_prompt_is_refused_at_the_call(eng, kind):
    prompt, words = BAD[kind]
    one = prompt[0] if kind == "nested" else prompt
    for call in (eng.add, eng.stream):
        with pytest.raises(ValueError, match=words):
            call(one, **GREEDY)
    if kind != "nested":
        with pytest.raises(ValueError, match=words):
            eng.generate(prompt, **GREEDY)
    if kind != "too long":
        with pytest.raises(ValueError, match=words):
            eng.logits(one)
    check_empty(eng)


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_prompt_in_a_batch_costs_itself_only(eng, text, kind):
    prompt = BAD[kind][0][0] if kind == "nested" else BAD[kind][0]
    out = eng.generate([IDS, prompt, IDS], **GREEDY)
    assert [c.index for c in out] == [0, 1, 2] and [c.error is None for c in out] == [
        True,
        False,
        True,
    ]
    assert (
        isinstance(out[1].error, ValueError)
        and out[1].finish_reason == "error"
        and out[1].token_ids == ()
    )
    assert out[0].token_ids == out[2].token_ids == text
    with pytest.raises(RuntimeError, match="1 of 3 requests failed; the first is item 1"):
        out.raise_for_errors()
    check_empty(eng)


def test_empty_prompts(eng, text):
    out = eng.generate([[], IDS], **GREEDY)
    assert "empty" in str(out[0].error) and out[1].token_ids == text
    for call in (eng.add, eng.stream, eng.logits):
        with pytest.raises(ValueError, match="empty"):
            call([])
    full = small_engine("one layer")
    out = full.generate("", **GREEDY)  # text always has the bos in front
    assert out[0].prompt_token_ids == (full.config.bos_token_id,) and len(out[0].token_ids) == 4


def test_text_without_a_tokenizer_says_what_to_pass(eng):
    with pytest.raises(ValueError, match="no tokenizer.json: pass token ids"):
        eng.generate("hello", **GREEDY)
    out = eng.generate(["hello", IDS], **GREEDY)
    assert out[0].error is not None and out[1].error is None and out[1].text == ""


def test_lengths_up_to_the_limit():
    """max_model_len holds prompt and output; the last position is used, one more is refused."""
    eng = small_engine("one layer", vocab=VOCAB, max_model_len=32, max_num_seqs=2)
    ids = stream(40, 3, high=90)
    for n, tokens in ((31, 1), (30, 2), (16, 16), (1, 31)):
        (c,) = eng.generate(ids[:n], temperature=0.0, max_tokens=1000, ignore_eos=True)
        assert len(c.token_ids) == tokens and c.finish_reason == "length" and c.error is None
        logits = eng.logits([*ids[:n], *c.token_ids])
        assert logits.shape[0] == 32 and logits[n - 1 : -1].argmax(-1).tolist() == list(c.token_ids)
    out = eng.generate([ids[:32], ids[:31]], **GREEDY)
    assert "32 tokens" in str(out[0].error) and len(out[1].token_ids) == 1
    with pytest.raises(ValueError, match="33 ids.*max_model_len=32"):
        eng.logits(ids[:33])
    one = small_engine("one layer", vocab=VOCAB, max_model_len=1)
    with pytest.raises(ValueError, match="at most 0"):
        one.generate([5])
    with pytest.raises(ValueError, match="max_model_len=2000000.*1048576"):
        small_engine("one layer", vocab=VOCAB, max_model_len=2_000_000).generate([5])


# ------------------------------------------------------------------------------ sampling values


def test_bad_sampling_values_at_the_call(eng):
    for bad in (
        dict(temperature=-1.0),
        dict(top_p=0.0),
        dict(top_k=0),
        dict(max_tokens=0),
        dict(seed=True),
    ):
        (name,) = bad
        for call in (eng.generate, eng.add, eng.stream):
            with pytest.raises(ValueError, match=name):
                call(IDS, **bad)
    with pytest.raises(TypeError, match="did you mean 'temperature'"):
        eng.generate(IDS, temprature=1.0)
    with pytest.raises(ValueError, match=r"top_logprobs=98\): the vocabulary has 97"):
        eng.generate(IDS, top_logprobs=98)
    with pytest.raises(ValueError, match="temperature.*were both given"):
        eng.generate(IDS, SamplingParams(), temperature=1.0)
    for params, found in (({"max_tokens": 3}, "dict"), ([SamplingParams(), 5], "int"), (7, "int")):
        with pytest.raises(TypeError, match=f"params must be SamplingParams.*found {found} "):
            eng.generate([IDS, IDS], params)
    for call in (eng.add, eng.stream, eng.astream):
        with pytest.raises(TypeError, match="params must be SamplingParams.*found dict .*keywords"):
            call(IDS, {"max_tokens": 3})
    with pytest.raises(TypeError, match="found deepinfer.compat.sampling_params.SamplingParams"):
        eng.add(IDS, di.LLM.SamplingParams())
    for params in ([SamplingParams()], [SamplingParams()] * 3):
        with pytest.raises(ValueError, match=f"params: {len(params)} for 2 prompts"):
            eng.generate([IDS, IDS], params)
    check_empty(eng)


def test_a_value_that_does_not_fit_the_engine_costs_its_item_only(eng, text):
    good = SamplingParams(**GREEDY)
    bad = [
        dataclasses.replace(good, top_logprobs=98),
        dataclasses.replace(good, grammar={"type": "object"}),
    ]
    out = eng.generate([IDS] * 4, [good, *bad, good])
    assert [c.error is None for c in out] == [True, False, False, True]
    assert "the vocabulary has 97" in str(out[1].error) and "grammar" in str(out[2].error)
    assert out[0].token_ids == out[3].token_ids == text
    check_empty(eng)


def test_an_unexpected_error_while_adding_leaves_nothing_behind():
    class Odd:
        def compile(self, spec, vocab):
            if spec is not None:
                raise spec
            return None

    eng = small_engine("one layer", vocab=VOCAB, grammar=Odd())
    each = [SamplingParams(**GREEDY), SamplingParams(**GREEDY, grammar=RuntimeError("a bug"))]
    with pytest.raises(RuntimeError, match="a bug"):
        eng.generate([IDS, IDS], each)
    check_empty(eng)
    out = eng.generate(
        [IDS, IDS], [each[0], SamplingParams(**GREEDY, grammar=TypeError("not a schema"))]
    )
    assert out[0].error is None and "not a schema" in str(out[1].error)


@pytest.mark.parametrize("k", [VOCAB, VOCAB + 1, 100_000])
def test_top_k_of_the_vocabulary_or_more_is_no_filter(eng, k):
    every = [eng.generate([IDS] * 3, seed=3, max_tokens=8, top_k=x) for x in (-1, k)]
    assert [c.token_ids for c in every[0]] == [c.token_ids for c in every[1]]


def test_filters_that_leave_one_token_are_greedy(eng):
    greedy = eng.generate(IDS, temperature=0.0, max_tokens=8)[0].token_ids
    for one in (
        dict(top_k=1),
        dict(top_p=1e-9),
        dict(temperature=9e-6),
        dict(temperature=0.0, top_k=5, top_p=0.3),
    ):
        assert eng.generate(IDS, **{"seed": 1, "max_tokens": 8, **one})[0].token_ids == greedy


def test_text_that_is_no_unicode_is_refused_with_its_index():
    tiny = di.Engine.tiny()
    for call in (tiny.generate, tiny.add, tiny.stream, tiny.score, tiny.encode):
        with pytest.raises(ValueError, match=r"Unicode: index 2 is the lone surrogate '\\ud8"):
            call("ab\ud800c", **({} if call in (tiny.score, tiny.encode) else GREEDY))
    for wrong in (b"ab", None, 3, ["ab"]):
        with pytest.raises(ValueError, match=f"one string, got {type(wrong).__name__}"):
            tiny.encode(wrong)
    bad, good = tiny.generate(["\udc00", "\U0001f600"], **GREEDY)
    assert "index 0" in str(bad.error) and good.error is None
    for empty in (torch.zeros(0, dtype=torch.long), torch.zeros(0), np.zeros(0)):
        with pytest.raises(ValueError, match="the prompt is empty"):
            tiny.generate(empty, **GREEDY)


def test_a_list_keeps_its_order_and_the_bar_counts_every_token(eng, monkeypatch):
    """Short ones finish first, one is refused, one stops before its limit: out[i] is input i, and the
    bar ends full."""
    seen: list = []

    class Bar:
        def __init__(self, total, what, show):
            seen.append((total, what, show))

        def update(self, n):
            assert n >= 0
            seen.append(n)

        __enter__ = lambda self: self  # noqa: E731
        __exit__ = lambda self, *_: seen.append("closed")  # noqa: E731

    monkeypatch.setattr("deepinfer.display.progress.bar", Bar)
    tokens = (9, 2, 5, 1)
    each = [SamplingParams(max_tokens=n, seed=n, ignore_eos=True) for n in tokens]
    out = eng.generate([IDS, IDS[:3], [], IDS[:2]], each, progress=True)
    assert [c.index for c in out] == [0, 1, 2, 3] and "empty" in str(out[2].error)
    assert [len(c.prompt_token_ids) for c in out] == [4, 3, 0, 2]
    assert [len(c.token_ids) for c in out] == [9, 2, 0, 1]
    assert seen[0] == (12, "generate", True) and seen[-1] == "closed" and sum(seen[1:-1]) == 12
    assert len(seen) >= 2 + 9  # while it runs, not at the end
    alone = [eng.generate(c.prompt_token_ids, p)[0] for c, p in zip(out, each) if c.error is None]
    assert [c.token_ids for c in alone] == [c.token_ids for c in out if c.error is None]
    stops = eng.with_()
    with stops.trace("logits", edit=lambda x, at: x.index_fill(1, torch.tensor([1]), 1e9)):  # eos
        seen.clear()
        stops.generate([IDS], max_tokens=20, progress=True)
    assert sum(seen[1:-1]) == 20


def test_a_text_is_tokenised_outside_of_the_lock(monkeypatch):
    """A long one takes seconds, and a stranger's tokens go on meanwhile."""
    tiny = di.Engine.tiny()
    begun, go_on = threading.Event(), threading.Event()
    plain = type(tiny).encode

    def slow(self, text, *args):
        if text == "long":
            begun.set()
            assert go_on.wait(15)
        return plain(self, text, *args)

    monkeypatch.setattr(type(tiny), "encode", slow)
    with tiny.background() as bg:
        few = dict(max_tokens=1)
        for call, how in (
            (tiny.add, few),
            (tiny.generate, few),
            (bg.add, few),
            (tiny.score, {}),
            (tiny.logits, {}),
        ):
            begun.clear()
            go_on.clear()
            thread = threading.Thread(target=call, args=("long",), kwargs=how)
            thread.start()
            assert begun.wait(15)
            assert len(bg.add("short", max_tokens=2, ignore_eos=True).result(15).token_ids) == 2
            go_on.set()
            thread.join(15)
            assert not thread.is_alive()


def test_a_prompt_that_is_far_too_long_is_refused_before_it_is_read(monkeypatch):
    tiny = di.Engine.tiny(max_model_len=64)
    read: list[int] = []
    plain = type(tiny).encode
    monkeypatch.setattr(
        type(tiny), "encode", lambda self, t, *args: read.append(len(t)) or plain(self, t, *args)
    )
    long = "def read(path):\n" * 400_000
    for call in (tiny.add, tiny.stream, tiny.generate):
        with pytest.raises(ValueError, match=r"more than \d+ tokens \(.* were counted\), .* 63 "):
            call(long)
    assert sum(read) < 30_000
    bad, good = tiny.generate([long, "short"], **GREEDY)
    assert "takes at most 63" in str(bad.error) and good.error is None

    class Ids(list):
        def __iter__(self):
            raise AssertionError("read")

    with pytest.raises(ValueError, match="the prompt has 1000000 tokens, this engine takes at mo"):
        tiny.add(Ids([5] * 1_000_000))
    with pytest.raises(ValueError, match="the prompt has 65 tokens"):  # counted to the last
        tiny.add([5] * 65)


def test_text_of_any_length_has_the_ids_that_the_tokenizer_gives():
    tiny = di.Engine.tiny()
    for text in ("", "a\u00e9\U0001f600 b", "def read(path):\n" * 4000):
        assert tiny.encode(text, False) == tiny.tokenizer.encode(text, add_special_tokens=False).ids
