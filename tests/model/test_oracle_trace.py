"""What NeMo AutoModel computes inside the stack, layer by layer, read through `eng.trace`."""

import pytest
import torch

from support import oracle

TOLERANCE = 1e-4  # absolute; streams reach 17
ROWS = torch.tensor([0, 1, 2, 7, 31, 64, 97, 127, 128])  # kept of the trace of 129 tokens
LAYERS = range(10)
PATTERNS = (
    "*.in",
    "*.attn.out",
    "*.ffn.out",
    "*.entries",
    "*.index_keys",
    "*.selected",
    "*.candidates",
    "features",
    "final",
)


@pytest.fixture(scope="module")
def traces(engine):
    """{n: trace} of the prompts of 5 and 129 tokens."""
    found = {}
    for n in (5, 129):
        with engine.trace(*PATTERNS) as found[n]:
            engine.logits(oracle.prompts()[n])
    return found


def expected(name):
    return oracle.numbers("trace")[name]


def rows(x, n):
    x = x.as_subclass(torch.Tensor)
    return x[ROWS] if n == 129 else x


def close(got, wanted):
    assert got.shape == wanted.shape
    assert (got - wanted).abs().max() <= TOLERANCE


@pytest.mark.parametrize("n", [5, 129])
@pytest.mark.parametrize("layer", LAYERS)
def test_layer(traces, n, layer):
    t = traces[n]
    close(rows(t[f"layers.{layer}.in"], n), expected(f"streams/{n}/{layer}"))
    close(rows(t[f"layers.{layer}.attn.out"], n), expected(f"attn/{n}/{layer}"))
    close(rows(t[f"layers.{layer}.ffn.out"], n), expected(f"ffn/{n}/{layer}"))


@pytest.mark.parametrize("n", [5, 129])
def test_ends(traces, engine, n):
    """`final` is traced before the last norm, the expected numbers are behind it."""
    x = rows(traces[n]["final"], n)
    normed = x * x.pow(2).mean(-1, keepdim=True).rsqrt() * engine.model.norm.weight
    close(normed, expected(f"final/{n}"))
    close(rows(traces[n]["features"], n), expected(f"dspark_feature/{n}"))


@pytest.mark.parametrize("n", [5, 129])
@pytest.mark.parametrize("layer", [2, 4, 6])
def test_block_kv(traces, n, layer):
    """Rows that close no group hold a value too; entries are those of the rows that close one."""
    ratio = 1 if layer == 6 else 2
    for what, theirs in (("entries", "ckv"), ("index_keys", "ikey")):
        got = traces[n][f"layers.{layer}.attn.{what}"].as_subclass(torch.Tensor)
        close(got[ratio - 1 :: ratio], expected(f"{theirs}/{n}/{layer}"))


@pytest.mark.parametrize("n", [5, 129])
@pytest.mark.parametrize("layer", [2, 4, 6, 8])
def test_selection(traces, n, layer):
    """The same entries in the same, ascending order."""
    got = traces[n][f"layers.{layer}.attn.selected"].as_subclass(torch.Tensor)
    wanted = expected(f"topk/{n}/{layer}").long()
    assert got.shape == wanted.shape
    assert torch.equal(got, wanted)


def test_candidate_blocks(traces):
    """Row 128 of 129 is the first to see more blocks than the 16 kept."""
    blocks = traces[129]["layers.6.attn.candidates"].as_subclass(torch.Tensor)
    wanted = expected("cand/129/6")
    kept = torch.zeros(129, 18, dtype=torch.bool)
    kept.scatter_(1, blocks.masked_fill(blocks < 0, 17), True)
    entries = kept[:, torch.arange(129) // 8] & torch.ones(129, 129, dtype=torch.bool).tril()
    assert torch.equal(entries, wanted)
    assert wanted[127].sum() == 128 and wanted[128].sum() == 121


def test_candidates_restrict_nothing_while_they_all_fit(traces):
    assert "layers.6.attn.candidates" not in traces[5].names
    assert torch.equal(expected("cand/5/6"), torch.ones(5, 5, dtype=torch.bool).tril())
