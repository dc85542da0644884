"""The drafter stage: DSpark on the frozen backbone, as it is stored, on text that it wrote itself."""

from __future__ import annotations

import time

import torch
from torch import Tensor

from deepinfer.model.stack import Model

from . import draft_loss, fast, weights, written
from .backbone import Balance, Training
from .batches import Split, Stream, mixed, pieces
from .config import Drafter
from .log import Log
from .muon import Optimiser, schedule


def train(
    model: Model, recipe: Drafter, data: dict[str, Split], *, seed: int, log: Log,
    compiled: bool = False, stop_after: float | None = None,
) -> dict[str, Tensor]:
    """Train the mtp blocks of `model`, whose other weights stay; returns {the model's weight name:
    FP32 weight}. stop_after: seconds after which the stage ends wherever it is (the log says so)."""
    r, device = recipe, model.device
    torch.manual_seed(seed)
    _restart(model, seed)
    trained = {
        n: p for n, p in model.named_parameters()
        if n.startswith("mtp.") and not n.endswith(("gate.bias", "gate.bias_vl"))
    }
    began = time.perf_counter()
    text = _written(model, r, data, seed, log, compiled)
    for p in trained.values():
        p.requires_grad_(True)
    optimiser = Optimiser(
        trained, weights.is_matrix, (r.muon_rate, r.adam_rate), (r.muon_decay, r.adam_decay), clip=r.clip
    )
    streams = [Stream(data["library"], seed + 2), Stream(data["tests"], seed + 3)]
    order = torch.Generator().manual_seed(seed)
    random = torch.Generator(device).manual_seed(seed)
    balance, stored = Balance(model.mtp, r.bias_rates), weights.rounding(model.config)
    last = time.perf_counter()
    for step in range(r.steps):
        ids, first = _batch(r, streams, text, order, device)
        tap = Training(r.dropout, "mtp.")
        slots = _slots(model, ids, r, first, random, compiled, tap)
        draft_loss.loss(slots).backward()
        factor = schedule(step, r.steps, r.warmup, r.constant, r.last)
        balance.step(tap.load, balance.rate((step + 1) / r.steps))
        norm = optimiser.step(factor, stored if step >= r.rounded_from * r.steps else None)
        for p in trained.values():
            p.grad = None
        late = stop_after is not None and time.perf_counter() - began > stop_after
        if step % 20 == 19 or step + 1 == r.steps or late:
            found = draft_loss.metrics(slots).numbers()
            now = time.perf_counter()
            log.row(
                stage="drafter", step=step + 1, seconds=now - began, rate=factor, grad=norm.item(),
                written=first > 0, seconds_a_step=(now - last) / (step % 20 + 1), max_load=balance.worst()[0], **_short(found),
            )
            last = now
        if (step + 1) % r.dev_every == 0 or step + 1 == r.steps or late:
            log.row(stage="dev", step=step + 1, **_short(evaluate(model, data["dev"], r, compiled)))
            last = time.perf_counter()
        if late:
            log.row(stage="stopped", step=step + 1, seconds=stop_after)
            break
    for p in trained.values():
        p.requires_grad_(False)
    masters = optimiser.masters()
    held = {n: p.detach() for n, p in model.named_parameters() if n not in masters}
    return {**held, **masters}


def _restart(model: Model, seed: int) -> None:
    """Fresh mtp weights, whatever the checkpoint held."""
    state = weights.initial(model.config, seed)
    fresh = weights.stacked(model.config, state)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.startswith("mtp."):
                p.copy_(fresh[name])


def _written(
    model: Model, r: Drafter, data: dict[str, Split], seed: int, log: Log, compiled: bool
) -> Tensor:
    """[generated, prompt + written] ids that the model wrote: the even rows greedily, the odd ones at
    temperature 1."""
    began = time.perf_counter()
    starts = written.prompts([data["library"], data["tests"]], r.generated, r.prompt, seed + 4)
    temperatures = (torch.arange(r.generated) % 2).float()
    text = written.write(model, starts, r.written, temperatures, seed=seed, compiled=compiled)
    ends = text[:, r.prompt :]
    different = [len(set(row.tolist())) / r.written for row in ends[:64].cpu()]
    log.row(
        stage="written", seconds=time.perf_counter() - began, tokens=ends.numel(),
        different_greedy=sum(different[::2]) / len(different[::2]),
        different_sampled=sum(different[1::2]) / len(different[1::2]),
    )
    return text


def _batch(
    r: Drafter, streams: list[Stream], text: Tensor, order: torch.Generator, device
) -> tuple[Tensor, int]:
    """(ids [b, t+1], first position whose draft counts): of the corpus, or what the model wrote."""
    if float(torch.rand((), generator=order)) >= r.generated_share:
        ids = torch.from_numpy(mixed(streams, [0.5, 0.5], r.rows, r.length + 1))
        return ids.to(device, non_blocking=True), 0
    rows = r.rows * r.length // (r.prompt + r.written)
    at = torch.randperm(len(text), generator=order)[:rows]
    return text[at.to(device)], r.prompt


def _slots(
    model: Model, ids: Tensor, r: Drafter, first: int, random: torch.Generator, compiled: bool,
    tap: Training | None = None,
) -> draft_loss.Slots:
    """Drafter against target at random anchors of ids [b, t+1], from position first - 1 on."""
    n = model.config.dspark_block_size
    b, t = ids.shape[0], ids.shape[1] // model.config.sliding_window * model.config.sliding_window
    ids = ids[:, :t]
    each = max(1, min(r.anchors * r.rows // b, t - first - 1 - n))
    anchors = draft_loss.random_anchors(b, t - first, each, n, device=ids.device, generator=random)
    anchors = draft_loss.Anchors(anchors.seq, anchors.last + first)
    ctx = fast.context(model.config, ids, compiled=compiled, dtype=model.dtype)
    ctx.batch = fast.without_logits(ctx.batch)
    with torch.no_grad():
        rows = model(ctx).rows
    ctx.tap = tap
    return draft_loss.compare(model, rows, ids, anchors, ctx, n, compiled=compiled)


@torch.no_grad()
def evaluate(model: Model, split: Split, r: Drafter, compiled: bool) -> dict:
    """Metrics on a split, at the same anchors every time."""
    ids = torch.from_numpy(pieces(split, r.length))[: r.rows].to(model.device)
    random = torch.Generator(model.device).manual_seed(0)
    return draft_loss.metrics(_slots(model, ids, r, 0, random, compiled)).numbers()


def _short(found: dict) -> dict:
    """What a log keeps of the metrics."""
    return {
        k: [round(x, 4) for x in v] if isinstance(v, list) else v
        for k, v in found.items() if k not in ("cross_entropy", "confidence_loss")
    }
