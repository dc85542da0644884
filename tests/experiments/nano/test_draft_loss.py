"""The drafter's loss on whole texts, against loops over anchors and against an engine's cache."""

import dataclasses
import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from deepinfer.checkpoint.loader import load
from deepinfer.checkpoint.memory import MemoryCheckpoint
from deepinfer.checkpoint.tiny import tiny_state
from deepinfer.engine.engine import Engine
from deepinfer.engine.step.batch import Work
from deepinfer.model.stack import Model
from deepinfer.slots.verifier import Fixed
from experiments.nano.train import draft_loss, fast
from experiments.nano.train.draft_attend import DraftBlocks
from experiments.nano.train.draft_loss import Anchors, Slots, compare, random_anchors
from support.model_rig import Sequence, context

N, LENGTH = 5, 48  # drafts; rows of a sequence: three windows of the tiny model
IDS = torch.randint(8, 900, (2, LENGTH), generator=torch.Generator().manual_seed(3))
# near the start, at the edge of the window (16), at the last place with room
ANCHORS = Anchors(torch.tensor([0, 0, 1, 1, 1]), torch.tensor([0, 15, 16, 30, LENGTH - 2 - N]))


@pytest.fixture(scope="module")
def model():
    """Frozen weights in float64, but for the drafter's."""
    own = Model(tiny_state(0)[0])
    load(own, MemoryCheckpoint(*tiny_state(0)), dtype=torch.float64)
    own.mtp.requires_grad_(True)
    return own


def forward(model, fidelity=0, ids=IDS, batched=True):
    """(ctx, Output) of the target, with logits of no row where the batched path runs."""
    if batched:
        ctx = fast.context(model.config, ids, fidelity=fidelity, dtype=torch.float64)
        none = torch.zeros(0, dtype=torch.long)
        ctx = dataclasses.replace(ctx, batch=dataclasses.replace(ctx.batch, logit_rows=none))
    else:
        works = [Work(row, logits="all") for row in ids.tolist()]
        ctx = context(model, works, fidelity=fidelity)
    with torch.no_grad():
        return ctx, model(ctx)


def compared(model, fidelity=0, **settings):
    ctx, out = forward(model, fidelity)
    return compare(model, out.rows, IDS, ANCHORS, ctx, N, **settings)


# ------------------------------------------------------------------------------------ comparison


@pytest.mark.parametrize("fidelity", [0, 1])
def test_slots_against_a_loop_over_an_engines_cache(model, fidelity):
    """Block by block from the cache, slot by slot from the text; p from the engine's own logits."""
    engine = Engine.tiny(
        dtype="float64",
        device="cpu",
        verifier=Fixed(N),
        max_model_len=64,
        max_num_seqs=2,
        fidelity=fidelity,
    )
    with torch.no_grad():
        got = compared(model, fidelity)
    for i, (s, a) in enumerate(zip(ANCHORS.seq.tolist(), ANCHORS.last.tolist())):
        row = IDS[s].tolist()
        target = engine.logits(row)
        blocks = in_cache(engine, row, a)
        for k, (logits, score) in enumerate(blocks):
            p, q = target[a + 1 + k].softmax(0), logits.softmax(0)
            text = row[a + 2 + k]
            tv = sum(abs(x - y) for x, y in zip(p.tolist(), q.tolist())) / 2
            assert abs(got.cross_entropy[i, k] + q[text].log()) < 1e-9
            assert abs(got.overlap[i, k] - (1 - tv)) < 1e-9
            assert abs(got.score[i, k] - score) < 1e-9
            assert bool(got.as_target[i, k]) == (int(q.argmax()) == int(p.argmax()))
            assert bool(got.as_text[i, k]) == (int(q.argmax()) == text)
    assert 0 < got.as_target.sum() < N * 5  # else agreement would not be tested


@torch.no_grad()
def in_cache(engine, row, a):
    """[(logits [v], score)] of the block behind row[: a+1], its Markov head fed with the text."""
    from deepinfer.engine.step.batch import build

    rt, drafter = engine.runtime, engine.model.drafter
    with Sequence(engine, len(row)) as sequence:
        sequence.feed(row[: a + 1])
        batch = build([sequence.work([row[a + 1]])], rt.config, decode=True)
        ctx = rt.context(batch)
        h, base = drafter.states(batch.ids, batch.positions, N, ctx)
    last, out = engine.model.mtp[-1], []
    for k in range(N):
        m = last.markov_head.embed.weight[row[a + 1 + k]]
        logits = base[0, k] + last.markov_head.head.weight @ m
        out.append((logits, last.confidence_head.proj.weight[0] @ torch.cat([h[0, k], m])))
    return out


def test_the_batched_path_and_the_plain_one(model):
    ctx, out = forward(model, batched=False)
    with torch.no_grad():
        plain = compare(model, out.rows, IDS, ANCHORS, ctx, N)
        batched = compared(model)
        at = ANCHORS.target_rows(N, LENGTH).flatten()
        given = compare(model, out.rows, IDS, ANCHORS, ctx, N, target=out.logits[at])
    for f in dataclasses.fields(Slots):
        for other in (batched, given):
            pair = getattr(plain, f.name).double(), getattr(other, f.name).double()
            assert (pair[0] - pair[1]).abs().max() < 1e-9, f.name


@pytest.mark.parametrize("fidelity", [0, 1])
def test_block_attention_is_the_general_one(model, fidelity):
    """Values and gradients of the drafter through both attention slots."""
    ctx, out = forward(model, fidelity, batched=False)
    token, seq, last = IDS[ANCHORS.seq, ANCHORS.last + 1], ANCHORS.seq, ANCHORS.last
    found = []
    for attention in (ctx.attention, DraftBlocks(N)):
        model.zero_grad()
        kept = model.drafter.sequence_context(out.rows, ctx)
        step = model.drafter.block_context(
            kept, seq, token, last + 1, dataclasses.replace(ctx, attention=attention)
        )
        h, base = model.drafter.states(token, last + 1, N, step)
        (h.square().mean() + base.square().mean()).backward()
        names = ("main_proj.weight", "attn.wkv.weight", "attn.attn_sink", "attn.wq_b.weight")
        gradients = [model.mtp[0].get_parameter(name).grad.clone() for name in names]
        found.append([h.detach(), base.detach(), *gradients])
    for x, y in zip(*found):
        assert y.abs().max() > 1e-6 and (x - y).abs().max() < 1e-9 * max(1, float(x.abs().max()))


def test_laws_in_single_and_half_precision():
    generator = torch.Generator().manual_seed(0)
    draft, target = torch.randn(2, 6, 50, generator=generator, dtype=torch.float64) * 3
    text = torch.arange(6)
    exact = draft_loss.laws(draft, target, text)
    assert exact[1].dtype == torch.float64
    for dtype, tolerance in ((torch.float32, 1e-6), (torch.bfloat16, 5e-2)):
        got = draft_loss.laws(draft.to(dtype), target.to(dtype), text)
        assert got[0].dtype == got[1].dtype == torch.float32
        for x, y in zip(got[:2], exact[:2]):
            assert (x - y).abs().max() < tolerance


# -------------------------------------------------------------------------------- loss and metrics


def random_slots(a=7, n=N):
    generator = torch.Generator().manual_seed(1)
    overlap, nats, score = torch.rand(3, a, n, generator=generator, dtype=torch.float64)
    return Slots(5 * nats, overlap, 8 * score - 4, overlap > 0.5, nats > 0.5)


def test_loss_against_a_loop():
    slots, total = random_slots(), 0.0
    weights = [math.exp(-(k - 1) / 4) for k in range(1, N + 1)]
    for i in range(7):
        for k in range(N):
            accept, c = slots.overlap[i, k].item(), 1 / (1 + math.exp(-slots.score[i, k].item()))
            bce = -(accept * math.log(c) + (1 - accept) * math.log(1 - c))
            part = 0.1 * slots.cross_entropy[i, k].item() + 0.9 * (1 - accept) + bce
            total += weights[k] * part / 7 / sum(weights)
    assert draft_loss.loss(slots).item() == pytest.approx(total, rel=1e-12)


def test_confidence_is_no_way_to_change_the_laws():
    """The target of the BCE is a constant: the overlap's gradient is that of 0.9 TV alone."""
    slots = random_slots()
    overlap = slots.overlap.clone().requires_grad_()
    draft_loss.loss(dataclasses.replace(slots, overlap=overlap)).backward()
    wanted = -0.9 * draft_loss.slot_weights(overlap).expand_as(overlap) / len(overlap)
    assert (overlap.grad - wanted).abs().max() < 1e-15


def test_accepted_length_is_that_of_rejection_sampling():
    """Against the sum over where the first refusal falls."""
    slots, expected = random_slots(), 0.0
    for row in slots.overlap.tolist():
        alive = 1.0
        for k, accept in enumerate(row):
            expected += alive * (1 - accept) * (k + 1) / 7  # k accepted, one from the target
            alive *= accept
        expected += alive * (N + 1) / 7
    assert draft_loss.metrics(slots).accepted.item() == pytest.approx(expected, rel=1e-12)
    for overlap, wanted in ((torch.ones_like(slots.overlap), N + 1), (0 * slots.overlap, 1)):
        sure = dataclasses.replace(slots, overlap=overlap)
        assert draft_loss.metrics(sure).accepted == wanted


def test_metrics_are_means_over_anchors():
    slots = random_slots()
    numbers = draft_loss.metrics(slots).numbers()
    assert numbers["loss"] == pytest.approx(draft_loss.loss(slots).item())
    for k in range(N):
        column = {f.name: getattr(slots, f.name)[:, k].tolist() for f in dataclasses.fields(slots)}
        for name in ("overlap", "as_target", "as_text", "cross_entropy"):
            assert numbers[name][k] == pytest.approx(sum(column[name]) / 7)
        logistic = [1 / (1 + math.exp(-x)) for x in column["score"]]
        assert numbers["confidence"][k] == pytest.approx(sum(logistic) / 7)
        bce = [
            -a * math.log(c) - (1 - a) * math.log(1 - c)
            for a, c in zip(column["overlap"], logistic)
        ]
        assert numbers["confidence_loss"][k] == pytest.approx(sum(bce) / 7)


# --------------------------------------------------------------------------------------- gradients

WEIGHTS = [
    "0.main_proj.weight",
    "0.attn.wkv.weight",
    "1.attn.kv_norm.weight",
    "2.norm.weight",
    "2.markov_head.embed.weight",
    "2.markov_head.head.weight",
    "2.confidence_head.proj.weight",
    "1.ffn.experts.w1.weight",
    "2.hc_ffn_fn",
]


def gradients(model, **settings):
    """Of the loss as it is minimised: confidence against a target that stands still."""
    model.zero_grad()
    draft_loss.loss(compared(model, **settings)).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def test_gradients_equal_differences(model):
    exact = gradients(model)
    assert all(name.startswith("mtp.") for name in exact)
    still = compared(model).overlap.detach()
    for name in WEIGHTS:
        g, flat = exact[f"mtp.{name}"].flatten(), model.mtp.get_parameter(name).data.view(-1)
        at = int(g.abs().argmax())
        assert difference(model, flat, at, still) == pytest.approx(g[at].item(), rel=1e-4), name


@torch.no_grad()
def difference(model, flat, at, still, step=1e-6):
    kept, sides = flat[at].item(), []
    for sign in (1, -1):
        flat[at] = kept + sign * step
        slots = compared(model)
        bce = draft_loss.confidence_loss(dataclasses.replace(slots, overlap=still))
        each = 0.1 * slots.cross_entropy + 0.9 * (1 - slots.overlap) + bce
        sides.append((each.mean(0) * draft_loss.slot_weights(each)).sum().item())
    flat[at] = kept
    return (sides[0] - sides[1]) / (2 * step)


def test_chunks_change_nothing(model):
    """Also where the last chunk is short."""
    whole, parts = gradients(model), gradients(model, chunk=7)
    assert whole.keys() == parts.keys()
    for name, g in whole.items():
        assert (g - parts[name]).abs().max() < 1e-12 * max(1, float(g.abs().max())), name


def test_steps_along_the_gradient_raise_acceptance(model):
    kept = {name: p.data.clone() for name, p in model.mtp.named_parameters()}
    before = draft_loss.metrics(compared(model)).numbers()
    for _ in range(8):
        found = gradients(model)
        with torch.no_grad():
            for name, p in model.mtp.named_parameters():
                g = found.get(f"mtp.{name}")
                p -= 0 if g is None else 1e-2 * g / (g.norm() + 1e-9)
    after = draft_loss.metrics(compared(model)).numbers()
    for name, p in model.mtp.named_parameters():
        p.data.copy_(kept[name])
    assert after["loss"] < before["loss"] and after["accepted"] > before["accepted"]


# ------------------------------------------------------------------------------ anchors, device


def test_random_anchors():
    generator = torch.Generator().manual_seed(0)
    got = random_anchors(3, 20, 14, N, generator=generator)  # every place there is
    assert got.seq.tolist() == [s for s in range(3) for _ in range(14)]
    for s in range(3):
        assert sorted(got.last[got.seq == s].tolist()) == list(range(14))
    assert (got.last + 1 + N < 20).all()
    some = [random_anchors(2, 100, 8, N, generator=generator).last.tolist() for _ in range(2)]
    assert some[0] != some[1] and some[0][:8] != some[0][8:]
    again = random_anchors(3, 20, 14, N, generator=torch.Generator().manual_seed(0))
    assert torch.equal(again.last, got.last)
    for each in (0, 15):
        with pytest.raises(ValueError, match="1 to 14 fit"):
            random_anchors(3, 20, each, N)


class OnDevice(TorchDispatchMode):
    """Refuses what would wait for a device: values read, shapes that depend on values."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        assert not name.startswith(("_local_scalar", "nonzero", "masked_select", "_unique")), name
        for ids in args[1] if name in ("index", "index_put", "index_put_") else ():
            assert ids is None or ids.dtype != torch.bool, name
        return func(*args, **(kwargs or {}))


def test_nothing_waits_for_the_device(model):
    ctx, out = forward(model)
    model.zero_grad()
    with OnDevice():
        anchors = random_anchors(2, LENGTH, 6, N)
        slots = compare(model, out.rows, IDS, anchors, ctx, N, chunk=16)
        draft_loss.loss(slots).backward()
        draft_loss.metrics(slots)
    for waits in (lambda: slots.overlap[slots.as_text], slots.as_text.any().item):
        with OnDevice(), pytest.raises(AssertionError):
            waits()
