"""Single modules on their own inputs against NeMo AutoModel: attention of every role, compressors,
MoE, Engram. (The pure ops are tested with the kernels.)"""

import dataclasses

import pytest
import torch

from deepinfer.engine.step.batch import Work
from deepinfer.model import mhc
from deepinfer.slots.protocols import Rows
from support import oracle
from support.model_rig import Seen, context

TOLERANCE = 1e-5  # absolute; one module, no depth to amplify a rounding
SMALLER = {2: 2, 6: 1}  # KV source -> tokens per entry


@pytest.fixture(scope="module", autouse=True)
def no_grad():
    with torch.no_grad():
        yield


def part(name):
    modules = oracle.numbers("modules")
    return modules[name] if name in modules else oracle.numbers("components")[name]


def close(got, wanted):
    assert got.shape == wanted.shape
    assert (got - wanted).abs().max() <= TOLERANCE


def forward(model, ids, streams=None):
    """(context, rows) of one sequence without history; streams are only read by Engram."""
    seen = Seen()
    ctx = context(model, [Work(list(ids))], tap=seen)
    batch, m, d = ctx.batch, model.config.hc_mult, model.config.hidden_size
    streams = torch.zeros(len(ids), m, d) if streams is None else streams
    pre = mhc.first_pre(len(ids), m, streams)
    return ctx, Rows(batch.row_set, streams, pre, batch.ids, batch.lookback), seen.values


@pytest.fixture(scope="module")
def chain(engine):
    """Outputs and named values of attention layers in turn on one input of 301 rows; the selection
    of one is carried to the next, as in the stack."""
    x = part("compressor/x")
    ctx, rows, seen = forward(engine.model, [0] * len(x))
    out = {}
    for layer in (0, 2, 3, 6, 7, 8, 9):
        out[layer], rows = engine.model.layers[layer].attn(x, rows, f"{layer}", ctx, None, None)
    return out, seen


@pytest.mark.parametrize("layer", [0, 2, 3, 6, 7, 8, 9])
def test_attention(chain, layer):
    """Window only (0), full of ratio 2 and its reuse (2, 3), candidate source (6), reuse of it (7),
    reindex (8), reuse of the reindex (9)."""
    close(chain[0][layer][3::4], part(f"attention/{layer}/out"))


@pytest.mark.parametrize("layer", [2, 6, 8])
def test_selection(chain, layer):
    assert torch.equal(chain[1][f"{layer}.selected"], part(f"attention/{layer}/topk").long())


@pytest.mark.parametrize("layer", [2, 6])
def test_entries_and_index_keys(chain, layer):
    r = SMALLER[layer]
    close(chain[1][f"{layer}.entries"][r - 1 :: r], part(f"attention/{layer}/compressed_kv"))
    close(chain[1][f"{layer}.index_keys"][r - 1 :: r], part(f"attention/{layer}/index_keys"))


def test_reindex_has_no_keys_of_its_own(chain):
    assert "6.index_keys" in chain[1] and "8.index_keys" not in chain[1]


def test_candidate_blocks(chain):
    """As a set of visible entries: the newest block is kept whole, hidden entries in it as well."""
    wanted = part("attention/candidates")
    n = len(wanted)
    blocks = chain[1]["6.candidates"]
    assert blocks.shape == (n, 16) and torch.equal(chain[1]["8.candidates"], blocks)
    none = -(-n // 8)
    kept = torch.zeros(n, none + 1, dtype=torch.bool)
    kept.scatter_(1, blocks.masked_fill(blocks < 0, none), True)
    visible = torch.ones(n, n, dtype=torch.bool).tril()
    assert torch.equal(kept[:, torch.arange(n) // 8] & visible, wanted & visible)
    assert wanted[-1].sum() < n  # they do restrict


@pytest.mark.parametrize("layer", [2, 6])
def test_compressor(engine, layer):
    """301 rows: with ratio 2 the last group stays open, and gives no entry."""
    x, r = part("compressor/x"), SMALLER[layer]
    ctx, rows, _ = forward(engine.model, [0] * len(x))
    out = engine.model.layers[layer].attn.compressor(x, rows.set, ctx)
    assert len(out) == 301 and len(part(f"compressor/{layer}/out")) == 301 // r
    close(out[r - 1 :: r], part(f"compressor/{layer}/out"))


@pytest.mark.parametrize("image", [False, True])
def test_router(engine, image):
    """Image rows choose by another bias; the weights do not contain it."""
    x = part("router/x")
    ctx, rows, seen = forward(engine.model, [0] * len(x))
    rows = dataclasses.replace(rows, image=torch.full((len(x),), image))
    engine.model.layers[3].ffn(x, rows, "moe", ctx)
    kind = "router_image" if image else "router"
    experts, order = seen["moe.experts"].sort(-1)
    wanted, theirs = part(f"{kind}/indices").long().sort(-1)
    assert torch.equal(experts, wanted)
    close(seen["moe.weights"].gather(1, order), part(f"{kind}/weights").gather(1, theirs))


def test_moe(engine):
    x = part("moe/x")
    ctx, rows, _ = forward(engine.model, [0] * len(x))
    close(engine.model.layers[3].ffn(x, rows, "moe", ctx), part("moe/out"))


def engram(engine, layer, ids):
    ctx, rows, seen = forward(engine.model, ids, part("engram/x"))
    out = engine.model.layers[layer].engram(rows, "engram", engine.model.token_map, ctx)
    return out, seen["engram.rows"]


def test_engram(engine):
    out, rows = engram(engine, 4, part("engram/ids").tolist())
    close(out, part("engram/out"))
    assert torch.equal(rows, part("engram/hash")[:, 1].long())


def test_engram_around_an_image(engine):
    """Rows of the span keep their streams; rows behind it hash as if the sequence began there. The
    reference's masked output has the gate closed over the unmasked memory, so that the three rows
    whose n-grams reach into the span are held to the hashes only."""
    alive = part("engram/mask")
    span = (~alive).nonzero().flatten()
    ids = part("engram/ids").long().where(alive, engine.config.image_token_id)
    out, rows = engram(engine, 4, ids.tolist())
    assert torch.equal(rows, part("engram/hash_masked")[:, 1].long())
    assert torch.equal(out[span], part("engram/x")[span])
    behind = torch.arange(3) + span[-1] + 1
    settled = torch.ones(len(ids), dtype=torch.bool).index_fill(0, behind, False)
    close(out[settled], part("engram/out_masked")[settled])
    assert not torch.equal(rows[behind], part("engram/hash")[behind, 1].long())


@pytest.mark.parametrize("layer, column", [(1, 0), (4, 1)])
def test_every_engram_layer_has_its_own_hash(engine, layer, column):
    _, rows = engram(engine, layer, part("engram/ids").tolist())
    assert torch.equal(rows, part("engram/hash")[:, column].long())
