"""Draft blocks over whole sequences without a cache: those of an engine, and their gradients."""

import dataclasses

import pytest
import torch

from deepinfer.checkpoint.loader import load
from deepinfer.checkpoint.memory import MemoryCheckpoint
from deepinfer.checkpoint.tiny import tiny_state
from deepinfer.engine.engine import Engine
from deepinfer.engine.step.batch import Work, build
from deepinfer.model.stack import Model
from deepinfer.slots.verifier import Fixed
from support.model_rig import Sequence, context

N, LENGTH = 5, 44  # rows of a block; of a sequence, past the window (16) and the ring (22)
# last accepted positions: without a full window, at its edge, where the engine's ring has wrapped
ANCHORS = [(0, 0), (0, 3), (0, 14), (0, 15), (0, 16), (0, 37), (1, 0), (1, 21), (1, 22), (2, 37)]


def texts(count=3, length=LENGTH):
    generator = torch.Generator().manual_seed(7)
    return torch.randint(8, 900, (count, length), generator=generator)


@pytest.fixture(scope="module")
def engine():
    return Engine.tiny(
        dtype="float64", device="cpu", verifier=Fixed(N), max_model_len=64, max_num_seqs=2
    )


def chosen(ids, anchors=ANCHORS):
    """(sequence, token behind the anchor, its position) of every block."""
    seqs, last = torch.tensor(anchors).T
    return seqs, ids[seqs, last + 1], last + 1


def blocks(model, ids, anchors=ANCHORS, fidelity=0, **changes):
    """(h, base logits) of all blocks at once, without a cache."""
    ctx = context(model, [Work(row, logits="none") for row in ids.tolist()], fidelity=fidelity)
    ctx = dataclasses.replace(ctx, **changes)
    drafter = model.drafter
    kept = drafter.sequence_context(model(ctx).rows, ctx)
    seqs, tokens, positions = chosen(ids, anchors)
    step = drafter.block_context(kept, seqs, tokens, positions, ctx)
    return drafter.states(tokens, positions, N, step)


@torch.no_grad()
def cached_blocks(engine, ids):
    """The same through the engine's cache, block by block."""
    rt, out = engine.runtime, []
    for s, row in enumerate(ids.tolist()):
        with Sequence(engine, len(row)) as sequence:
            for _, last in [a for a in ANCHORS if a[0] == s]:
                sequence.feed(row[len(sequence.ids) : last + 1])
                batch = build([sequence.work([row[last + 1]])], rt.config, decode=True)
                out.append(
                    rt.model.drafter.states(batch.ids, batch.positions, N, rt.context(batch))
                )
    return [torch.cat(x) for x in zip(*out)]


@pytest.mark.parametrize("fidelity, packed", [(0, False), (1, False), (1, True)])
def test_blocks_are_those_of_an_engine(engine, fidelity, packed):
    engine, ids = engine.with_(fidelity=fidelity, packed_cache=packed), texts()
    with torch.no_grad():
        bare = blocks(engine.model, ids, fidelity=fidelity)
    for got, wanted in zip(bare, cached_blocks(engine, ids)):
        assert got.shape == wanted.shape and wanted.abs().max() > 1
        assert (got - wanted).abs().max() < 1e-9


def test_roundings_of_the_context_count(engine):
    """Otherwise fidelity 1 would not be tested above."""
    with torch.no_grad():
        exact, rounded = (blocks(engine.model, texts(), fidelity=f)[1] for f in (0, 1))
    assert (exact - rounded).abs().max() > 1e-3


def test_slot_logits_are_what_an_engine_draws_from(engine):
    """The engine's greedy block, its own tokens fed back as the tokens before each slot."""
    ids, model = texts(1), engine.model
    with Sequence(engine.with_(fidelity=0), LENGTH) as sequence:
        sequence.feed(ids[0, :20].tolist())
        logits, tokens, confidence = sequence.draft(int(ids[0, 20]))
    ctx = context(model, [Work(ids[0].tolist(), logits="none")])
    with torch.no_grad():
        h, base = blocks(model, ids, [(0, 19)])
        previous = torch.cat([ids[0, 20:21], tokens[:-1]])
        own, score = model.drafter.slot_logits(h[0], base[0], previous, ctx)
    assert (own - logits).abs().max() < 1e-9
    assert (score.sigmoid() - confidence).abs().max() < 1e-9
    assert len(set(confidence.tolist())) == N


def test_what_a_block_reads(engine):
    """W context rows up to its anchor in its own sequence, and nothing else."""
    model, ids = engine.model, texts(2)
    seen = {}

    def tap(name, x, rows):
        if name != "features":
            return x
        seen["features"] = x.detach().clone().requires_grad_()
        return seen["features"]

    for p in model.mtp.parameters():
        assert not p.requires_grad
    for at in (3, 15, 30):
        _, base = blocks(model, ids, [(1, at)], tap=tap)
        (gradient,) = torch.autograd.grad(base.square().sum(), seen["features"])
        read = gradient.view(2, LENGTH, -1).abs().sum(-1) > 0
        wanted = torch.zeros(2, LENGTH, dtype=torch.bool)
        wanted[1, max(at - 15, 0) : at + 1] = True
        assert torch.equal(read, wanted)


def test_blocks_do_not_see_each_other(engine):
    with torch.no_grad():
        together = blocks(engine.model, texts())
        for i, anchor in enumerate(ANCHORS[:5]):
            alone = blocks(engine.model, texts(), [anchor])
            for x, y in zip(together, alone):
                assert (x[i] - y[0]).abs().max() < 1e-11


def test_steps_of_one_forward_share_nothing_but_the_models_constants(engine):
    """Rows' angles, plans and places belong to one step, those of the target's forward to that."""
    ids, model = texts(2), engine.model
    ctx = context(model, [Work(row, logits="none") for row in ids.tolist()])
    drafter, found = model.drafter, []
    with torch.no_grad():
        kept = drafter.sequence_context(model(ctx).rows, ctx)
        before = dict(ctx._shared)
        assert {key[0] for key in before} > {"frequencies"}
        for at in (15, 30):
            step = drafter.block_context(kept, *chosen(ids, [(1, at)]), ctx)
            assert {key[0] for key in step._shared} == {"frequencies"}
            found.append(drafter.states(*chosen(ids, [(1, at)])[1:], N, step)[1])
            assert ctx._shared == before, "a draft step wrote into the forward's values"
        for at, base in zip((15, 30), found):
            assert (base - blocks(model, ids, [(1, at)])[1]).abs().max() < 1e-11


def test_no_blocks(engine):
    ids, none = texts(1), torch.zeros(0, dtype=torch.long)
    ctx = context(engine.model, [Work(ids[0].tolist(), logits="none")])
    drafter = engine.model.drafter
    with torch.no_grad():
        kept = drafter.sequence_context(engine.model(ctx).rows, ctx)
        step = drafter.block_context(kept, none, none, none, ctx)
        h, base = drafter.states(none, none, N, step)
    assert h.shape == (0, N, 128) and base.shape == (0, N, 1024)


def test_refusals(engine):
    ids, model = texts(1)[0].tolist(), engine.model
    odd, even = ([Work(ids, logits="none"), Work(ids[:-n], logits="none")] for n in (1, 2))
    later = [Work(ids, start=4, before=ids[:3], logits="none")]
    for works in (odd, even, later, []):  # even: one length by their total, not by themselves
        ctx = context(model, works)
        rows = model(context(model, [Work(ids, logits="none")])).rows if works is later else None
        rows = rows or model(ctx).rows
        with pytest.raises(ValueError, match="sequences of one length, each from its position 0"):
            model.drafter.sequence_context(rows, ctx)
    ctx = context(model, odd)  # lengths that only the device knows: their total still tells
    rows = model(ctx).rows
    rows = dataclasses.replace(rows, set=dataclasses.replace(rows.set, segments=None))
    with pytest.raises(ValueError, match="lengths on the device"):
        model.drafter.sequence_context(rows, ctx)
    ctx = context(model, [Work(ids, logits="none")])
    rows = dataclasses.replace(model(ctx).rows, features=())
    with pytest.raises(ValueError, match=r"reads layers \[7, 8, 9\], but 0 of them"):
        model.drafter.sequence_context(rows, ctx)


# ------------------------------------------------------------------------------------- gradients


@pytest.fixture(scope="module")
def trained():
    """A copy of the weights in which only the drafter wants gradients."""
    config, state, tokenizer = tiny_state(0)
    own = Model(config)
    load(own, MemoryCheckpoint(config, state, tokenizer), dtype=torch.float64)
    own.mtp.requires_grad_(True)
    return own


def size(model, fidelity=0):
    """A loss that every slot enters with its own weight."""
    h, base = blocks(model, texts(2, 30), [(0, 2), (1, 15), (1, 22)], fidelity)
    slots = torch.arange(1, N + 1, dtype=base.dtype)[:, None]
    return (slots * base.softmax(-1).square()).sum() + (slots * h.square()).mean() * 0.01


WEIGHTS = [
    "0.main_proj.weight",
    "0.main_norm.weight",
    "0.attn.wkv.weight",
    "0.attn.kv_norm.weight",
    "1.attn.wkv.weight",
    "1.attn.attn_sink",
    "2.attn.wq_b.weight",
    "2.attn.wo_b.weight",
    "0.hc_attn_fn",
    "1.ffn.gate.weight",
    "2.ffn.experts.w2.weight",
    "2.norm.weight",
]


def test_gradients_equal_differences(trained):
    """At the largest entry of a weight and at one of middling size."""
    trained.zero_grad()
    size(trained).backward()
    for name in WEIGHTS:
        p = trained.mtp.get_parameter(name)
        order = p.grad.flatten().abs().argsort(descending=True)
        for at in {int(order[0]), int(order[int((p.grad != 0).sum()) // 4])}:
            wanted = p.grad.flatten()[at].item()
            assert wanted != 0, name
            assert difference(trained, p.data.view(-1), at) == pytest.approx(wanted, rel=1e-4), name


@torch.no_grad()
def difference(model, flat, at, step=1e-6):
    kept, sides = flat[at].item(), []
    for sign in (1, -1):
        flat[at] = kept + sign * step
        sides.append(size(model).item())
    flat[at] = kept
    return (sides[0] - sides[1]) / (2 * step)


def test_gradients_pass_the_rounding_and_reach_the_drafter_only(trained):
    exact = {}
    for fidelity in (0, 1):
        trained.zero_grad()
        size(trained, fidelity).backward()
        got = {name for name, p in trained.named_parameters() if p.grad is not None}
        assert got and all(name.startswith("mtp.") for name in got)
        for name in ("main_proj", "main_norm", "attn.wkv", "attn.kv_norm"):
            g = trained.mtp[0].get_parameter(f"{name}.weight").grad.flatten().clone()
            if fidelity:
                alike = torch.nn.functional.cosine_similarity(exact[name], g, 0)
                assert 0.5 < alike < 1 - 1e-9, (name, alike)
            exact[name] = g
