"""di.LLM: DeepInfer's names, defaults and results over an Engine; its tokens are the Engine's."""

from __future__ import annotations

import dataclasses
import inspect
import warnings

import pytest

import deepinfer as di
from deepinfer.checkpoint.tiny import write_tiny
from deepinfer.compat import engine_args
from deepinfer.compat.llm import LLM, Outputs, RequestOutput
from deepinfer.compat.sampling_params import NO_EOS_FIRST, NoEosFirst
from deepinfer.engine.engine import Engine
from deepinfer.engine.scheduling.scheduler import FCFS, DecodeOrder
from deepinfer.slots.grammar import NoGrammar
from support.pool import check_empty

P = di.LLM.SamplingParams
SMALL = dict(max_num_seqs=4, max_model_len=128)
PROMPTS = [[0, 5, 9, 301, 44], [0, 7], [0, *range(20, 90)]]
GREEDY = P(temperature=0, max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def eng() -> Engine:
    return Engine.tiny(dtype="float64")


@pytest.fixture(scope="module")
def llm(eng) -> LLM:
    return LLM(eng, **SMALL)


@pytest.fixture(scope="module")
def ids(eng) -> LLM:
    return LLM(eng, decode_sequence=False, **SMALL)


def tokens(out: Outputs) -> list[tuple[int, ...]]:
    return [tuple(o.token_id for o in row) for row in out]


# ----------------------------------------------------------------------------------- the same text


@pytest.mark.parametrize(
    "fields",
    [
        dict(temperature=0),
        dict(temperature=1.0, seq_seed=3),
        dict(temperature=0.7, top_p=0.9, top_k=40, seq_seed=2**64 - 1),
    ],
)
def test_tokens_are_the_engines(eng, ids, fields):
    out = ids.generate(prompt_token_ids=PROMPTS, sampling_params=P(max_tokens=7, **fields))
    ours = {("seed" if k == "seq_seed" else k): v for k, v in fields.items()}
    assert tokens(out) == [c.token_ids for c in eng.generate(PROMPTS, max_tokens=7, **ours)]
    check_empty(ids.engine)


def test_strings_are_the_engines_text(eng, llm):
    texts = ["def f(x):", "import os"]
    out = llm.generate(texts, GREEDY)
    done = eng.generate(texts, temperature=0.0, max_tokens=6, ignore_eos=True)
    assert out == [c.text for c in done] and all(type(t) is str for t in out)
    assert [c.token_ids for c in out.completions] == [c.token_ids for c in done]
    assert llm.generate(texts[0], GREEDY) == out[:1]
    assert llm.generate(prompt_token_ids=eng.encode(texts[1]), sampling_params=GREEDY) == out[1:]


def test_ids_go_before_text(eng, llm):
    given = llm.generate(["aaa", "bbb"], GREEDY, [eng.encode("x"), eng.encode("y")])
    assert given == llm.generate(["x", "y"], GREEDY)
    with pytest.raises(ValueError, match="2 prompts and 1 prompt_token_ids"):
        llm.generate(["a", "b"], GREEDY, [[0]])
    with pytest.raises(ValueError, match="give prompts"):
        llm.generate()
    with pytest.raises(ValueError, match="go into prompt_token_ids"):
        llm.generate([0, 5, 9], GREEDY)
    assert llm.generate([]) == [] and llm.generate(prompt_token_ids=[]) == []


def test_params_are_one_or_one_a_prompt(eng, ids):
    each = [P(max_tokens=2), di.SamplingParams(max_tokens=3), P(max_tokens=4, seq_seed=1)]
    each = [dataclasses.replace(p, ignore_eos=True) for p in each]
    out = ids.generate(prompt_token_ids=PROMPTS, sampling_params=each)
    assert [len(row) for row in out] == [2, 3, 4]
    with pytest.raises(ValueError, match="2 for 3 prompts"):
        ids.generate(prompt_token_ids=PROMPTS, sampling_params=each[:2])
    for wrong in ([GREEDY, GREEDY, {}], ["greedy"] * 3):
        with pytest.raises(TypeError, match=r"want LLM.SamplingParams, got (dict|str)"):
            ids.generate(prompt_token_ids=PROMPTS, sampling_params=wrong)
    with pytest.raises(ValueError, match="sampling_params is one"):
        ids.generate(prompt_token_ids=PROMPTS, sampling_params=5)


def test_requests_that_share_an_object_share_its_seed(ids):
    one = P(max_tokens=6, ignore_eos=True)
    a, b = tokens(ids.generate(prompt_token_ids=[PROMPTS[0]] * 2, sampling_params=one))
    assert a == b == tokens(ids.generate(prompt_token_ids=PROMPTS[0], sampling_params=one))[0]
    two = [P(max_tokens=6, ignore_eos=True) for _ in range(2)]
    c, d = tokens(ids.generate(prompt_token_ids=[PROMPTS[0]] * 2, sampling_params=two))
    assert len({a, c, d}) == 3
    e, f = tokens(ids.generate(prompt_token_ids=[PROMPTS[0]] * 2))  # default: one object, 16 tokens
    assert e == f


# ------------------------------------------------------------------------------ one object a token


def test_outputs_are_one_object_a_token(ids):
    before = ids.generate(prompt_token_ids=PROMPTS[1], sampling_params=GREEDY)[0][0].request_id
    p = P(temperature=0, max_tokens=5, ignore_eos=True, top_logprobs=3, prompt_logprobs=True)
    out = ids.generate(prompt_token_ids=PROMPTS[:2], sampling_params=p)
    assert [row[0].request_id for row in out] == [before + 1, before + 2]
    for row, c in zip(out, out.completions):
        assert [o.num_output_tokens for o in row] == [1, 2, 3, 4, 5]
        assert [o.finished for o in row] == [False] * 4 + [True]
        assert [o.finish_reason for o in row] == [None] * 4 + ["length"]
        assert all(o.prompt_len == len(c.prompt_token_ids) for o in row)
        assert [o.token_logprobs for o in row] == list(c.logprobs)
        assert all(o.top_token_ids[0] == o.token_id and len(o.top_logprobs) == 3 for o in row)
        assert all(o.top_logprobs == sorted(o.top_logprobs, reverse=True) for o in row)
        assert row[0].prompt_logprobs == list(c.prompt_logprobs) and row[1].prompt_logprobs is None
    plain = ids.generate(prompt_token_ids=PROMPTS[1], sampling_params=GREEDY)[0][0]
    assert plain.top_logprobs is None and plain.top_token_ids is None
    assert plain.prompt_logprobs is None


def test_the_documented_fields_are_there():
    names = {f.name for f in dataclasses.fields(RequestOutput)}
    assert names == {
        "request_id",
        "prompt_len",
        "token_id",
        "finish_reason",
        "finished",
        "token_logprobs",
        "nextn_logprobs",
        "sum_smaller_probs",
        "top_logprobs",
        "top_token_ids",
        "num_output_tokens",
        "prompt_logprobs",
        "draft_tok",
        "accept_tok",
        "confidence_score",
    }


# ------------------------------------------------------------------------------------------ errors


@pytest.mark.parametrize("decode", [True, False])
def test_errors_stay_in_their_place(eng, decode):
    with LLM(eng, decode_sequence=decode, **SMALL) as llm:
        good = llm.generate(prompt_token_ids=PROMPTS[:1], sampling_params=GREEDY)
        bad = [[5, 99999], PROMPTS[0], list(range(3, 203)), []]
        with pytest.warns(UserWarning, match="3 of 4 prompts failed; the first is item 0.*99999"):
            out = llm.generate(prompt_token_ids=bad, sampling_params=GREEDY)
        empty = "" if decode else []
        assert [out[i] for i in (0, 2, 3)] == [empty] * 3 and sorted(out.errors) == [0, 2, 3]
        assert "200 tokens" in str(out.errors[2])
        assert out[1] == good[0] if decode else tokens([out[1]]) == tokens(good)
        with pytest.raises(RuntimeError, match="3 of 4 requests failed"):
            out.raise_for_errors()
        assert good.raise_for_errors() is good and good.errors == {}
        check_empty(llm.engine)


def test_a_single_bad_prompt_raises(llm):
    with pytest.raises(ValueError, match="99999"):
        llm.generate(prompt_token_ids=[5, 99999])
    with pytest.raises(ValueError, match="lone surrogate"):
        llm.generate("\ud800")
    with pytest.raises(ValueError, match="multi_modal_data"):
        llm.generate("a", multi_modal_data={})


def test_no_warning_where_all_went_well(llm):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        llm.generate(["a", "b"], GREEDY)


# ---------------------------------------------------------------------------------- SamplingParams


def test_fields_and_defaults_are_the_documented_ones():
    made = P()
    seed = made.seq_seed
    assert seed is not None and 0 <= seed < 2**64 and P().seq_seed != seed
    assert dataclasses.asdict(made) == dict(
        temperature=1.0,
        top_p=1.0,
        top_k=-1,
        ignore_eos=False,
        max_tokens=16,
        logprobs=None,
        prompt_logprobs=False,
        top_logprobs=0,
        first_n_token_no_eos=0,
        eos_id=0,
        so_args=None,
        golden_token_ids=None,
        seq_seed=seed,
    )
    assert made.translate() == di.SamplingParams(max_tokens=16, seed=seed)
    assert list(inspect.signature(P).parameters) == [f.name for f in dataclasses.fields(P)]


@pytest.mark.parametrize("t", [0, 0.0, 9.9e-6, 1e-9, -1.0])
def test_a_low_temperature_is_greedy(t):
    p = P(temperature=t, top_p=0.5, top_k=3)
    assert (p.temperature, p.top_p, p.top_k) == (1e-5, 1.0, -1)
    assert p.translate().greedy and p.translate().top_p == 1.0


def test_above_it_nothing_is_changed():
    p = P(temperature=1.1e-5, top_p=0.5, top_k=3)
    assert (p.temperature, p.top_p, p.top_k) == (1.1e-5, 0.5, 3) and not p.translate().greedy


def test_the_edges():
    assert P(max_tokens=0).max_tokens == 1
    assert P(seq_seed=-1).seq_seed == 2**64 - 1 and P(seq_seed=2**64 + 5).seq_seed == 5
    assert P(logprobs=5).translate().top_logprobs == 0 and P(logprobs=True).logprobs is True
    assert P(eos_id=77, seq_seed=1).translate() == P(seq_seed=1).translate()
    assert P(top_p=1, top_k=2**31 - 1, top_logprobs=1000).top_logprobs == 1000
    shared = P()
    assert dataclasses.replace(shared, max_tokens=3).seq_seed == shared.seq_seed
    assert P(prompt_logprobs=True).translate().prompt_logprobs
    assert not P(prompt_logprobs=True).translate(exact=False).prompt_logprobs


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (dict(top_p=0), "top_p"),
        (dict(top_p=1.1), "top_p"),
        (dict(top_k=0), "top_k"),
        (dict(top_k=-2), "top_k"),
        (dict(top_k=2**31), "top_k"),
        (dict(max_tokens=-1), "max_tokens"),
        (dict(max_tokens=False), "max_tokens"),
        (dict(temperature=float("nan")), "temperature"),
        (dict(temperature="hot"), "temperature"),
        (dict(top_logprobs=1001), "0..1000"),
        (dict(top_logprobs=-1), "0..1000"),
        (dict(first_n_token_no_eos=2), "0 or 1"),
        (dict(first_n_token_no_eos=True), "an integer"),
        (dict(seq_seed=1.5), "seq_seed"),
        (dict(eos_id=None), "eos_id"),
        (dict(so_args={"schema_type": "json"}), "so_args=...*is not available: .*grammar"),
        (dict(golden_token_ids=[1]), "golden_token_ids=...*is not available: .*logits"),
    ],
)
def test_what_is_not_allowed_is_refused_by_name(fields, words):
    with pytest.raises(ValueError, match=words):
        P(**fields)


def test_unknown_fields():
    with pytest.raises(TypeError, match="did you mean 'temperature'"):
        P(temprature=1)
    with pytest.raises(TypeError, match="'min_p'.*top_p or top_k"):
        P(min_p=0.1)
    with pytest.raises(TypeError):
        P(1.0)  # type: ignore[misc]


def test_the_end_token_is_not_the_first_where_it_is_asked(eng):
    """The rule takes the model's favourite token for the end; behind the first it may come."""
    first = eng.generate(PROMPTS[1], temperature=0.0, max_tokens=1)[0].token_ids[0]
    for drafting in ("off", di.verifier.Fixed(5)):
        base = eng.with_(grammar=NoEosFirst(first))
        llm = LLM(base, verifier=drafting, decode_sequence=False, **SMALL)
        free, held = (P(temperature=0, max_tokens=4, first_n_token_no_eos=n) for n in (0, 1))
        out = llm.generate(prompt_token_ids=[PROMPTS[1]] * 2, sampling_params=[free, held])
        a, b = tokens(out)
        assert a[0] == first and b[0] != first and len(b) == 4
        follow = eng.generate([*PROMPTS[1], b[0]], temperature=0.0, max_tokens=3)[0].token_ids
        assert b[1:] == follow


def test_that_rule_is_a_grammar_like_any_other():
    vocab = [bytes([c]) for c in range(40)]
    report = di.check(NoEosFirst(3), spec=NO_EOS_FIRST, vocab=vocab)
    assert report, report
    state = NoEosFirst(3).compile(NO_EOS_FIRST, vocab).start()
    assert not state.accept(3) and state.accept(4) and state.accept(3)
    state.rollback(2)
    assert state.allowed().tolist() == [i != 3 for i in range(40)]
    with pytest.raises(ValueError, match="no grammar compiler"):
        NoEosFirst(3).compile("json", vocab)


class Own(NoGrammar):
    """Another grammar slot."""

    def compile(self, spec, vocab):
        return super().compile(None, vocab)


def test_beside_a_grammar_of_ones_own_it_is_refused(eng):
    assert LLM(eng).engine.slots["grammar"] == NoEosFirst(eng.config.eos_token_id)
    for llm in (LLM(eng, grammar=Own, **SMALL), LLM(eng.with_(grammar=Own), **SMALL)):
        assert type(llm.engine.slots["grammar"]) is Own
        with pytest.raises(ValueError, match="first_n_token_no_eos=1"):
            llm.generate("a", P(first_n_token_no_eos=1))


# ------------------------------------------------------------------------------------- constructor

DOCUMENTED = dict(
    served_model_name="deepinfer-model",
    trust_remote_code=False,
    load_format="auto",
    seed=0,
    max_model_len=None,
    data_parallel_size=0,
    context_parallel_size=1,
    expert_parallel_size=1,
    engram_parallel_size=0,
    engine_rank=0,
    engine_group_rank=0,
    gpu_memory_utilization=0.90,
    max_num_batched_tokens=None,
    max_num_seqs=256,
    disable_log_stats=True,
    revision=None,
    tokenizer_revision=None,
    stop_preempted_request=False,
    engine_type=0,
    chunked_prefill=False,
    ignore_len=128 * 2**20,
    tokens_per_block=-1,
    lookahead_tokens=0,
    offline_inference=True,
)
OTHER = dict(
    served_model_name="mine",
    load_format="dummy",
    data_parallel_size=8,
    context_parallel_size=2,
    expert_parallel_size=8,
    engram_parallel_size=2,
    engine_rank=1,
    engine_group_rank=1,
    gpu_memory_utilization=0.5,
    disable_log_stats=False,
    revision="main",
    tokenizer_revision="v1",
    engine_type=1,
    ignore_len=5,
    lookahead_tokens=8,
    offline_inference=False,
    tokens_per_block=64,
    tokenizer="elsewhere",
)


def test_arguments_and_defaults_are_the_documented_ones():
    assert {a.name: a.default for a in engine_args.ARGUMENTS} == DOCUMENTED
    assert len(engine_args.ARGUMENTS) == len(DOCUMENTED)
    assert [(p.name, p.default) for p in inspect.signature(LLM).parameters.values()][1:-1] == [
        ("tokenizer", None),
        ("trust_remote_code", False),
        ("expert_parallel_size", 1),
        ("revision", None),
        ("tokenizer_revision", None),
        ("seed", 0),
        ("gpu_memory_utilization", 0.9),
        ("decode_sequence", True),
    ]
    table = LLM.arguments()
    shown = dict(zip(table["argument"], table["default"]))
    assert shown == {n: repr(v) for n, v in DOCUMENTED.items()}
    assert all(table["note"])


def test_every_default_may_be_written_out(eng):
    plain, written = LLM(eng), LLM(eng, **DOCUMENTED)
    assert plain.engine.settings == written.engine.settings
    LLM(eng, tokenizer=eng.source, trust_remote_code=True)
    LLM(eng, data_parallel_size=1, engram_parallel_size=1, engine_type="NORMAL")


def test_every_argument_is_used_or_refused():
    used = {a.name for a in engine_args.ARGUMENTS if a.used}
    assert used | set(OTHER) | {"trust_remote_code"} == {*DOCUMENTED, "tokenizer"}


@pytest.mark.parametrize("name", sorted(OTHER))
def test_what_cannot_be_had_is_refused_by_name(eng, name):
    with pytest.raises(ValueError, match=rf"LLM\({name}=.*not available.*: .{{12}}"):
        LLM(eng, **{name: OTHER[name]})


def test_the_engine_gets_what_is_asked(eng):
    s = LLM(eng).engine.settings
    assert (s.max_num_seqs, s.max_model_len, s.seed, s.page_size) == (256, None, 0, None)
    assert s.max_num_batched_tokens == 4096
    assert repr(LLM(eng).engine.slots["verifier"]) == "Fixed(5)"
    asked = dict(max_num_seqs=1000, seed=7, max_model_len=5000, tokens_per_block=128)
    s = LLM(eng, **asked).engine.settings
    assert (s.max_num_batched_tokens, s.seed, s.max_model_len, s.page_size) == (6000, 7, 5000, 128)
    s = LLM(eng, max_num_seqs=1000, verifier="off", max_model_len=5000).engine.settings
    assert s.max_num_batched_tokens == 5000
    s = LLM(eng, fidelity=0, page_size=32, num_pages=40, prefix_cache=False).engine.settings
    assert (s.fidelity, s.page_size, s.num_pages) == (0, 32, 40)
    assert LLM(eng.with_(page_size=32)).engine.settings.page_size == 32
    with pytest.raises(ValueError, match="give one of them"):
        LLM(eng, tokens_per_block=128, page_size=32)


def test_a_prompt_that_may_not_be_split_must_fit_a_step(eng):
    with pytest.raises(ValueError, match="tokens=64.*max_model_len=128.*chunked_prefill"):
        LLM(eng, max_num_batched_tokens=64, **SMALL)
    with pytest.raises(ValueError, match="max_model_len=4096"):
        LLM(eng, max_num_batched_tokens=64)
    pieces = dict(max_num_batched_tokens=64, chunked_prefill=True)
    split = LLM(eng, decode_sequence=False, **pieces, **SMALL)
    want = eng.generate(PROMPTS, temperature=0.0, max_tokens=6, ignore_eos=True)
    out = split.generate(prompt_token_ids=PROMPTS, sampling_params=GREEDY)
    assert tokens(out) == [c.token_ids for c in want]


def test_a_request_that_gives_way_is_computed_again_or_ended(eng):
    """A pool of 6 pages of 16 tokens for three requests that want 3 each."""
    pool = dict(max_num_seqs=3, max_model_len=48, num_pages=6, page_size=16, verifier="off")
    prompts = [[0, *range(k, k + 13)] for k in (20, 60, 200)]
    p = P(temperature=0, max_tokens=30, ignore_eos=True)
    again = LLM(eng, decode_sequence=False, **pool)
    ended = LLM(eng, decode_sequence=False, stop_preempted_request=True, **pool)
    assert again.engine.settings.scheduler == "decode_order"
    assert ended.engine.settings.scheduler == DecodeOrder(stop_preempted=True)
    done = eng.generate(prompts, temperature=0.0, max_tokens=30, ignore_eos=True)
    want = [c.token_ids for c in done]
    out = again.generate(prompt_token_ids=prompts, sampling_params=p)
    assert tokens(out) == want and again.engine.stats.preemptions
    out = ended.generate(prompt_token_ids=prompts, sampling_params=p)
    reasons = [row[-1].finish_reason for row in out]
    assert set(reasons) == {"length", "insufficient_system_resource"} and not out.errors
    assert all(w[: len(t)] == t for t, w in zip(tokens(out), want))
    check_empty(again.engine)
    check_empty(ended.engine)


def test_the_scheduler(eng, monkeypatch):
    assert LLM(eng, scheduler="fcfs").engine.settings.scheduler == "fcfs"
    with pytest.raises(ValueError, match="give one of them"):
        LLM(eng, scheduler=FCFS(), stop_preempted_request=True)
    with pytest.raises(ValueError, match=r"stop_preempted_request=1\): True or False"):
        LLM(eng, stop_preempted_request=1)
    monkeypatch.setenv("DEEPINFER_PREFILL_MAX_SUM_SEQLEN_K", "5000")
    assert LLM(eng).engine.settings.max_context == 5000
    assert LLM(eng, scheduler="fcfs").engine.settings.max_context == 5000
    assert LLM(eng, stop_preempted_request=True).engine.settings.max_context == 5000
    with pytest.raises(
        ValueError, match=r"max_context=5000 was given, and scheduler=FCFS\(max_context=10\)"
    ):
        LLM(eng, scheduler=FCFS(max_context=10))
    with pytest.raises(ValueError, match="PREFILL_MAX_SUM_SEQLEN_K=5000 .*max_model_len=6000"):
        LLM(eng, max_model_len=6000)


def test_unknown_arguments(eng):
    with pytest.raises(TypeError, match="did you mean 'max_num_seqs'"):
        LLM(eng, max_num_seq=3)
    with pytest.raises(TypeError, match=r"LLM\.arguments"):
        LLM(eng, zzzzzz=3)


def test_overlap_is_on_unless_something_says_otherwise(eng):
    asked = dict(given={}, found=engine_args.environment.Found(), config=eng.config)
    assert engine_args.engine_keywords(**asked)["overlap"] is True
    assert engine_args.engine_keywords(**asked | {"given": {"overlap": False}})["overlap"] is False
    found = engine_args.environment.Found({"overlap": False})
    assert engine_args.engine_keywords(**asked | {"found": found})["overlap"] is False


def test_the_environment_is_read_when_it_is_made(eng, monkeypatch):
    monkeypatch.setenv("DEEPINFER_USE_NEXTN_DECODE", "2")
    assert repr(LLM(eng).engine.slots["verifier"]) == "Fixed(2)"
    assert repr(LLM(eng, verifier="off").engine.slots["verifier"]) == "Off()"
    monkeypatch.setenv("DEEPINFER_USE_NEXTN_DECODE", "0")
    assert repr(LLM(eng).engine.slots["verifier"]) == "Off()"
    monkeypatch.setenv("DEEPINFER_BATCH_INVARIANT", "1")
    assert LLM(eng).engine.settings.batch_invariant
    assert not LLM(eng, batch_invariant=False).engine.settings.batch_invariant
    monkeypatch.setenv("DEEPINFER_ENABLE_MTP_VARLEN", "1")
    with pytest.raises(ValueError, match="DEEPINFER_ENABLE_MTP_VARLEN"):
        LLM(eng)


def test_rows_are_dropped_where_the_environment_says_so(eng, monkeypatch):
    """Off is DeepInfer's default; a keep that is too small is refused by the engine's model."""
    assert repr(LLM(eng).engine.slots["replay"]) == "Exact()" and LLM(eng).engine.exact
    monkeypatch.setenv("DEEPINFER_YOCO_PREFILL_TRUNCATION_MODE", "mask")
    monkeypatch.setenv("DEEPINFER_YOCO_PREFILL_KEEP_TOKENS", "40")
    llm = LLM(eng)
    assert repr(llm.engine.slots["replay"]) == "Bounded(keep=40, mode='mask')"
    assert "approximate" in repr(llm.engine)
    assert LLM(eng, replay="exact").engine.exact
    monkeypatch.setenv("DEEPINFER_YOCO_PREFILL_KEEP_TOKENS", "9")
    with pytest.raises(ValueError, match="keep=9.*keep >= 22") as caught:
        LLM(eng)
    assert "DEEPINFER_YOCO_PREFILL_KEEP_TOKENS=9" in caught.value.__notes__[0]
    monkeypatch.setenv("DEEPINFER_YOCO_PREFILL_TRUNCATION_MODE", "off")
    assert LLM(eng.with_(replay="bounded")).engine.exact


def test_an_engines_refusal_says_what_the_environment_set(eng, monkeypatch):
    monkeypatch.setenv("DEEPINFER_USE_NEXTN_DECODE", "9")
    with pytest.raises(ValueError, match="at most 5") as caught:
        LLM(eng)
    assert caught.value.__notes__ == ["set by the environment: DEEPINFER_USE_NEXTN_DECODE=9"]


def test_from_a_folder_like_from_an_engine(eng, tmp_path):
    folder = str(write_tiny(tmp_path / "tiny"))
    with LLM(folder, tokenizer=folder, dtype="float64", decode_sequence=False, **SMALL) as llm:
        out = tokens(llm.generate(prompt_token_ids=PROMPTS, sampling_params=GREEDY))
        assert llm.engine.source == folder
    want = eng.generate(PROMPTS, temperature=0.0, max_tokens=6, ignore_eos=True)
    assert out == [c.token_ids for c in want]
    with pytest.raises(FileNotFoundError, match="no such folder"):
        LLM(str(tmp_path / "nothing"))


def test_tokenizer_and_close(eng):
    llm = LLM(eng, **SMALL)
    assert llm.get_tokenizer() is eng.tokenizer
    assert "LLM over Engine of tiny" in repr(llm)
    llm.close()
    llm.close()
    with pytest.raises(RuntimeError, match="closed"):
        llm.generate("a")
    assert not eng.closed


def test_production_runs_on_the_tiny_model():
    config = di.EngineConfig.production().replace(max_num_seqs=2)
    with Engine.tiny(**dataclasses.asdict(config)) as eng:
        assert len(eng.generate(PROMPTS[0], max_tokens=3, ignore_eos=True)[0].token_ids) == 3
