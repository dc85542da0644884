"""DEEPINFER_* variables: every documented one becomes a setting or is refused by name."""

from __future__ import annotations

import html
import os
import re
import subprocess
import sys
import warnings

import pytest

import deepinfer as di
from deepinfer.compat import environment
from deepinfer.compat.environment import BY_NAME, VARIABLES, read

GIB = 2**30
# The documented table: name -> (default as it would be written, another legal value).
DOCUMENTED = {
    "ACCELERATOR": ("nvidia", "ascend"),
    "COMPUTE_SUM_SMALLER_PROBS": ("0", "1"),
    "JIT_CACHE_DIR": ("", "/var/cache"),
    "NCCL_NUM_SMS": ("32", "16"),
    "USERBUFFER_COMM_SMS": ("0", "8"),
    "GLOO_TIMEOUT": ("14400", "60"),
    "REARRANGE_P2P_GROUPS": ("1", "2"),
    "OVERRIDE_NUM_EXTRA_EXPERTS": ("0", "16"),
    "EXPERT_COUNT_WINDOW_SIZE": ("100", "10"),
    "EXPERT_REARRANGEMENT_STEP_INTERVAL": ("0", "500"),
    "REARRANGE_AFTER_PREFILL_IN_NORMAL_ENGINE": ("0", "1"),
    "MOE_LB_STAT_INTERVAL": ("128", "1"),
    "FORCE_IMBALANCE_RATIO": ("0.0", "1.8"),
    "FORCE_LOAD_BALANCE": ("0", "1"),
    "SHOW_EPLB_DETAIL": ("0", "1"),
    "PREFILL_MAX_SUM_SEQLEN_K": ("", "100000"),
    "INDEX_ATTN_MEMORY_LIMIT": (str(10 * GIB), str(GIB)),
    "USE_NEXTN_DECODE": ("5", "3"),
    "ENABLE_MTP_VARLEN": ("0", "1"),
    "MAX_BACKTRACKING_TOKENS": ("6", "7"),
    "DFLASH_CONFIDENCE_HEAD_TEMPERATURE": ("1.0", "1.5"),
    "ENGRAM_PAD_TOKEN": ("2", "0"),
    "ENGRAM_FORCE_GPU_STORAGE": ("0", "1"),
    "SAMPLER_FORCE_TOPK": ("0", "50"),
    "DECODE_TOKEN_BLACKLIST": ("", "5,6"),
    "ENFORCE_EAGER": ("0", "1"),
    "CUDAGRAPH_BATCH_SIZE_INTERVAL": ("8", "16"),
    "DFLASH_ENFORCE_EAGER": ("0", "1"),
    "DFLASH_CUDAGRAPH_BATCH_SIZE_INTERVAL": ("8", "16"),
    "DECODE_PERF_CACHE_DIR": ("", "/var/cache"),
    "DECODE_PERF_CACHE_TTL_SEC": ("3600", "1"),
    "NUM_STATE_SLOTS_RATIO": ("1.2", "2"),
    "PREFILL_STORE_EXTRA_STATE": ("0", "1"),
    "PREFILL_STORE_EXTRA_SIZE": ("128", "256"),
    "XGRAMMAR_DEBUG": ("0", "1"),
    "XGRAMMAR_TIMEOUT": ("20", "1"),
    "XGRAMMAR_DISABLE_CACHE": ("0", "1"),
    "XGRAMMAR_CACHE_LIMIT_BYTES": (str(10 * GIB), "0"),
    "SO_BUILDER_CPUS": ("4", "1"),
    "PREFILL_ATTEMPT_INTERVAL": ("70", "1"),
    "PREFILL_ANY_ATTEMPT_INTERVAL": ("100", "1"),
    "ZERO_OVERHEAD_SCHEDULING": ("0", "1"),
    "LOGGING_INTERVAL_STEP": ("100", "1"),
    "NCCL_MEMORY_SAMPLE_INTERVAL_STEPS": ("1000", "1"),
    "RINGBUFFER_WARNING_INTERVAL": ("60", "1"),
    "GC_INTERVAL_STEP": ("1000", "1"),
    "YOCO_PREFILL_TRUNCATION_MODE": ("off", "compact"),
    "YOCO_PREFILL_KEEP_TOKENS": ("0", "140"),
    "BATCH_INVARIANT": ("0", "1"),
    "DISABLE_SYNC_GUARD": ("0", "1"),
    "PROFILE_TORCH_CUDA_MEMORY": ("", "/tmp/m"),
    "ENABLE_MEMORY_TRACING": ("0", "1"),
    "PROFILE_HTTP_ENABLE": ("0", "1"),
    "PROFILE_HTTP_PORT_BASE": ("6070", "6071"),
    "TORCH_PROFILER_DIR": ("/tmp", "/var/tmp"),
    "USE_MULTIMODAL_POOL": ("0", "1"),
    "MULTIMODAL_POOL_SIZE_GB": ("8", "1"),
    "MULTI_MODAL_BUFFER_SIZE": ("512", "1"),
    "MULTI_MODAL_WORKER_TIMEOUT": ("1800", "1"),
    "HF_MODEL_DIR": ("", "/models"),
    "CPP_LOG_LEVEL": ("", "3"),
    "FUSED_SAMPLE_STRESS_TEST": ("", "1"),
    "FUSED_SAMPLE_DETAIL_LOG": ("", "1"),
}
FIELDS = {"ZERO_OVERHEAD_SCHEDULING": "overlap", "BATCH_INVARIANT": "batch_invariant"}
TAKEN = {"ENGRAM_FORCE_GPU_STORAGE", "ENFORCE_EAGER", "DFLASH_ENFORCE_EAGER", "DISABLE_SYNC_GUARD"}
TAKEN |= {"HF_MODEL_DIR", "CPP_LOG_LEVEL", "FUSED_SAMPLE_STRESS_TEST", "FUSED_SAMPLE_DETAIL_LOG"}
OTHERWISE = {"USE_NEXTN_DECODE", "PREFILL_MAX_SUM_SEQLEN_K"}
OTHERWISE |= {"YOCO_PREFILL_TRUNCATION_MODE", "YOCO_PREFILL_KEEP_TOKENS"}
REFUSED = sorted(set(DOCUMENTED) - set(FIELDS) - TAKEN - OTHERWISE)


def env(**texts: str) -> dict[str, str]:
    return {f"DEEPINFER_{name}": text for name, text in texts.items()}


def test_every_documented_name_is_there_once():
    assert sorted(v.name for v in VARIABLES) == sorted(DOCUMENTED)
    assert len(BY_NAME) == len(VARIABLES)


@pytest.mark.parametrize("name", sorted(DOCUMENTED))
def test_the_default_is_the_documented_one_and_changes_nothing(name):
    default, other = DOCUMENTED[name]
    variable = BY_NAME[f"DEEPINFER_{name}"]
    assert variable.convert(default) == variable.default
    assert variable.convert(other) != variable.default
    found = read(env(**{name: default}))
    assert di.EngineConfig(**found.settings) == di.EngineConfig()
    assert found.drafts == (5 if name == "USE_NEXTN_DECODE" else None)


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_had_is_refused_by_name_with_the_reason(name):
    with pytest.raises(ValueError, match=f"DEEPINFER_{name}=.*not available: .{{20}}"):
        di.EngineConfig.from_env(env(**{name: DOCUMENTED[name][1]}))


@pytest.mark.parametrize("name", sorted(TAKEN))
def test_what_holds_anyway_is_taken(name):
    assert di.EngineConfig.from_env(env(**{name: DOCUMENTED[name][1]})) == di.EngineConfig()


@pytest.mark.filterwarnings("ignore:.*counts as true")
@pytest.mark.parametrize(("name", "field"), FIELDS.items())
@pytest.mark.parametrize(
    ("text", "value"),
    [("0", False), ("", False), ("false", False), ("False", False)]
    + [("1", True), ("true", True), ("FALSE", True), ("no", True), ("00", True), (" ", True)],
)
def test_a_field_is_set_by_the_documented_rule_of_booleans(name, field, text, value):
    config = di.EngineConfig.from_env(env(**{name: text}))
    assert getattr(config, field) is value
    assert config.diff(di.EngineConfig()) == ({field: (True, False)} if value else {})


def test_nothing_set_is_the_default():
    assert di.EngineConfig.from_env({}) == di.EngineConfig()
    assert di.EngineConfig.from_env({"PATH": "/bin", "DI_DISPLAY": "test"}) == di.EngineConfig()


@pytest.mark.parametrize("text", ["ask", "", "Off", "off "])
def test_a_choice_is_one_of_those_listed(text):
    words = "DEEPINFER_YOCO_PREFILL_TRUNCATION_MODE=.*'off', 'mask', 'compact'"
    with pytest.raises(ValueError, match=words):
        read(env(YOCO_PREFILL_TRUNCATION_MODE=text))
    with pytest.raises(ValueError, match="DEEPINFER_ACCELERATOR=.*'nvidia', 'ascend'"):
        read(env(ACCELERATOR="tpu"))


@pytest.mark.parametrize(
    ("name", "text"),
    [("NCCL_NUM_SMS", "many"), ("NCCL_NUM_SMS", ""), ("NCCL_NUM_SMS", "3.5")]
    + [("GLOO_TIMEOUT", "nan"), ("GLOO_TIMEOUT", "inf"), ("XGRAMMAR_TIMEOUT", "soon")]
    + [("DFLASH_CONFIDENCE_HEAD_TEMPERATURE", "1.0,,1.0"), ("USE_NEXTN_DECODE", "five")]
    + [("PREFILL_MAX_SUM_SEQLEN_K", "none"), ("PREFILL_MAX_SUM_SEQLEN_K", "0")]
    + [("USE_NEXTN_DECODE", "-1")],
)
def test_a_text_that_is_no_value_names_the_variable(name, text):
    with pytest.raises(ValueError, match=f"^DEEPINFER_{name}"):
        read(env(**{name: text}))


def test_an_unknown_name_is_answered_with_the_nearest():
    with pytest.raises(ValueError, match="BATCH_INVARIENT.*mean DEEPINFER_BATCH_INVARIANT"):
        di.EngineConfig.from_env(env(BATCH_INVARIENT="1"))
    with pytest.raises(ValueError, match=r"DEEPINFER_ZZZZ.*EngineConfig\.environment"):
        di.EngineConfig.from_env(env(ZZZZ=""))


def test_drafts_are_a_slot():
    assert read(env(USE_NEXTN_DECODE="3")).drafts == 3
    with pytest.raises(ValueError, match=r"DEEPINFER_USE_NEXTN_DECODE=3.*Fixed\(3\)"):
        di.EngineConfig.from_env(env(USE_NEXTN_DECODE="3"))
    assert di.EngineConfig.from_env(env(USE_NEXTN_DECODE="0")) == di.EngineConfig()


def test_rows_dropped_are_a_slot():
    both = dict(YOCO_PREFILL_TRUNCATION_MODE="compact", YOCO_PREFILL_KEEP_TOKENS="140")
    assert read(env(**both)).truncation == ("compact", 140)
    with pytest.raises(ValueError, match=r"TRUNCATION_MODE=compact.*Bounded\(140, 'compact'\)"):
        di.EngineConfig.from_env(env(**both))
    for keep in ({}, dict(YOCO_PREFILL_KEEP_TOKENS="0")):
        with pytest.raises(ValueError, match="TRUNCATION_MODE=mask needs .*KEEP_TOKENS.*134"):
            read(env(YOCO_PREFILL_TRUNCATION_MODE="mask", **keep))
    with pytest.raises(ValueError, match="KEEP_TOKENS=-1: want 0 or more"):
        read(env(YOCO_PREFILL_KEEP_TOKENS="-1"))
    off = env(YOCO_PREFILL_TRUNCATION_MODE="off", YOCO_PREFILL_KEEP_TOKENS="140")
    assert di.EngineConfig.from_env(off) == di.EngineConfig() and read(off).truncation[0] == "off"
    assert read(env(YOCO_PREFILL_KEEP_TOKENS="140")).truncation is None


@pytest.mark.parametrize(("drafts", "steps"), [("3", "4"), ("0", "1"), ("5", "2"), ("8", "9")])
def test_rings_step_back_by_the_drafts_and_one(drafts, steps):
    read(env(USE_NEXTN_DECODE=drafts, MAX_BACKTRACKING_TOKENS=steps))
    with pytest.raises(ValueError, match="DEEPINFER_MAX_BACKTRACKING_TOKENS"):
        more = str(int(drafts) + 2)
        read(env(USE_NEXTN_DECODE=drafts, MAX_BACKTRACKING_TOKENS=more))


def test_the_context_of_a_prefill_step_is_a_field():
    config = di.EngineConfig.from_env(env(PREFILL_MAX_SUM_SEQLEN_K="9000"))
    assert config == di.EngineConfig(max_context=9000)
    assert config.diff(di.EngineConfig()).keys() == {"max_context"}


def test_temperatures_are_one_or_one_a_draft():
    read(env(DFLASH_CONFIDENCE_HEAD_TEMPERATURE="1,1,1,1,1"))
    with pytest.raises(ValueError, match="has 3 values: one, or one for each of 5 drafts"):
        read(env(DFLASH_CONFIDENCE_HEAD_TEMPERATURE="1,1,1"))
    with pytest.raises(ValueError, match="not available"):
        read(env(DFLASH_CONFIDENCE_HEAD_TEMPERATURE="1,1,1,1,2", USE_NEXTN_DECODE="5"))


def test_it_is_read_at_the_call_and_kept_nowhere(monkeypatch):
    assert di.EngineConfig.from_env() == di.EngineConfig.from_env(dict(os.environ))
    monkeypatch.setenv("DEEPINFER_BATCH_INVARIANT", "1")
    assert di.EngineConfig.from_env().batch_invariant
    assert not di.EngineConfig().batch_invariant
    monkeypatch.delenv("DEEPINFER_BATCH_INVARIANT")
    assert not di.EngineConfig.from_env().batch_invariant


def test_importing_reads_nothing_and_torch_is_not_needed():
    code = (
        "import os, sys; os.environ['DEEPINFER_NO_SUCH_NAME'] = '1'\n"
        "import deepinfer as di, deepinfer.compat.environment\n"
        "di.EngineConfig(); di.EngineConfig.from_env({'DEEPINFER_BATCH_INVARIANT': '1'})\n"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_table_for_a_reader():
    table = di.EngineConfig.environment()
    assert table["variable"] == [v.name for v in VARIABLES]
    here = {row["variable"]: row["here"] for row in table}
    assert here["BATCH_INVARIANT"] == "batch_invariant"
    assert here["ZERO_OVERHEAD_SCHEDULING"] == "overlap"
    assert here["PREFILL_MAX_SUM_SEQLEN_K"] == "max_context"
    assert here["YOCO_PREFILL_TRUNCATION_MODE"] == here["YOCO_PREFILL_KEEP_TOKENS"] == "replay"
    assert here["USE_NEXTN_DECODE"] == "verifier" and here["NCCL_NUM_SMS"] == "default only"
    assert {name for name, what in here.items() if what in ("already so", "not read")} == {
        *TAKEN,
        "MAX_BACKTRACKING_TOKENS",
    }
    assert all(row["note"] and row["type"] and row["default"] is not None for row in table)
    assert "note" in repr(table).splitlines()[1]


def test_fields_named_in_the_table_exist():
    fields = set(di.EngineConfig.__dataclass_fields__)
    assert {v.becomes for v in VARIABLES if v.use == "field"} <= fields
    uses = {"field", "drafts", "truncation", "already", "elsewhere", "refused"}
    assert {v.use for v in VARIABLES} == uses


# ------------------------------------------------------------------------- the documents' settings


def test_production_is_what_the_documents_say():
    config = di.EngineConfig.production()
    assert (config.max_num_seqs, config.max_model_len, config.page_size) == (256, 4096, 128)
    assert config.max_num_batched_tokens == max(4096, 256 * (1 + environment.DRAFTS)) == 4096
    assert (config.dtype, config.fidelity, config.batch_invariant) == ("bfloat16", 2, False)
    assert config.scheduler == "decode_order" and config.overlap
    assert config.packed_cache and config.keep_quantised and config.seed == 0


def test_what_has_no_field_is_named():
    text = " ".join((di.EngineConfig.production.__doc__ or "").split())
    named = ("Fixed(5)", "bounded replay", "replay=di.replay.Bounded()", "num_pages")
    for words in (*named, "parallelism", "graphs"):
        assert words in text


@pytest.mark.parametrize("table", [di.EngineConfig.environment, di.LLM.arguments])
def test_the_tables_show_their_notes_whole(table):
    shown = table()
    for row in shown:
        assert row["note"] in shown.to_text()
    page = shown._repr_html_()
    for row in shown[:20]:
        assert html.escape(row["note"], quote=True) in page


def test_the_table_says_what_di_llm_does_and_the_rule_of_booleans():
    table = di.EngineConfig.environment()
    row = table.where(variable="ZERO_OVERHEAD_SCHEDULING")[0]
    assert row["default"] == "False" and row["note"].startswith("di.LLM: on unless this says 0")
    llm = di.LLM(di.Engine.tiny(), max_model_len=64, max_num_seqs=2)
    assert llm.engine.settings.overlap  # as the row says
    assert "false for 0, false, False and an empty text" in table.title


@pytest.mark.parametrize("text", ["no", "off", "FALSE", "No", " 0", "n", "none", "disabled", " "])
def test_a_text_that_looks_like_a_no_counts_as_true_and_says_so(text):
    found = f"DEEPINFER_BATCH_INVARIANT={text!r} counts as true: a bool is false for 0"
    with pytest.warns(UserWarning, match=re.escape(found)):
        assert read(env(BATCH_INVARIANT=text)).settings == {"batch_invariant": True}
    with pytest.warns(UserWarning, match="counts as true"), pytest.raises(ValueError, match="True"):
        read(env(ENABLE_MEMORY_TRACING=text))


@pytest.mark.parametrize("text", ["0", "", "false", "False", "1", "true", "yes", "on"])
def test_what_reads_as_it_counts_warns_of_nothing(text):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        want = text not in ("0", "", "false", "False")
        assert read(env(BATCH_INVARIANT=text)).settings == {"batch_invariant": want}
        read(env(TORCH_PROFILER_DIR="/tmp", CPP_LOG_LEVEL="off"))  # no booleans


@pytest.mark.parametrize("name", ["FOO", "X", "LOG", "DEVICE", "SCHEDULER", "MAX_NUM_SEQS"])
def test_no_far_name_is_suggested(name):
    with pytest.raises(ValueError, match="no such variable.*lists those there are") as caught:
        read(env(**{name: "1"}))
    assert "did you mean" not in str(caught.value)


@pytest.mark.parametrize(
    "wrong, meant",
    [
        ("ZERO_OVERHEAD_SCHEDULER", "ZERO_OVERHEAD_SCHEDULING"),
        ("BATCHINVARIANT", "BATCH_INVARIANT"),
        ("USE_NEXTN", "USE_NEXTN_DECODE"),
        ("NCCL_NUM_SM", "NCCL_NUM_SMS"),
    ],
)
def test_a_near_name_is(wrong, meant):
    with pytest.raises(ValueError, match=f"did you mean DEEPINFER_{meant}\\?"):
        read(env(**{wrong: "1"}))
