"""The drafter stage: DSpark on the frozen backbone, as it is stored, on text that it wrote."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from deepinfer.model.stack import Model
from experiments.nano.config import Drafter
from experiments.nano.train import draft_loss, fast, weights, written
from experiments.nano.train.backbone import Balance, Training
from experiments.nano.train.batches import (
    Split,
    Stream,
    mixed,
    pieces,
    trained_shares,
    trained_streams,
)
from experiments.nano.train.graphs import Captured
from experiments.nano.train.log import Log
from experiments.nano.train.muon import Optimiser, Rounding, schedule

DEV_ROWS = 8  # pieces of dev text that the drafter is judged on


@dataclass
class Source:
    """One kind of text. text: [n, t] ids (None: the corpus, rows made as they are asked for);
    first: position from which on drafts count; rows: sequences a step."""

    name: str
    text: Tensor | None
    first: int
    rows: int
    length: int


def train(
    model: Model,
    recipe: Drafter,
    data: dict[str, Split],
    *,
    seed: int,
    log: Log,
    compiled: bool = False,
    capture: bool = False,
    stop_after: float | None = None,
) -> dict[str, Tensor]:
    """Train the mtp blocks of `model`, whose other weights stay; returns {the model's weight name:
    FP32 weight}. Other arguments as of the backbone's."""
    r = recipe
    torch.manual_seed(seed)
    if r.fresh:
        restart(model, seed)
    trained = {
        n: p
        for n, p in model.named_parameters()
        if n.startswith("mtp.") and not n.endswith(("gate.bias", "gate.bias_vl"))
    }
    began = time.perf_counter()
    sources = _sources(model, r, data, seed, log, compiled, capture)
    for p in trained.values():
        p.requires_grad_(True)
    optimiser = Optimiser(
        trained,
        weights.is_matrix,
        (r.muon_rate, r.adam_rate),
        (r.muon_decay, r.adam_decay),
        clip=r.clip,
    )
    balance = Balance(model.mtp, r.bias_rates)
    roundings = (None, weights.rounding(model.config))
    steps = {
        (s.name, rounding is not None): step_of(
            model, r, s, optimiser, balance, compiled, capture, rounding
        )
        for s in sources
        for rounding in roundings
    }
    streams = list(trained_streams(data, r.renamed, seed + 2).values())
    order, shares = torch.Generator().manual_seed(seed), torch.tensor(r.shares)
    last = time.perf_counter()
    for step in range(r.steps):
        done = (step + 1) / r.steps
        source = sources[int(torch.multinomial(shares, 1, generator=order))]
        ids = _rows(source, streams, r.renamed, order, step).to(model.device)
        factor = schedule(step, r.steps, r.warmup, r.constant, r.last)
        run = steps[source.name, step >= r.rounded_from * r.steps]
        found = run(ids=ids, factor=factor, bias_rate=balance.rate(done))
        late = stop_after is not None and time.perf_counter() - began > stop_after
        if step % 20 == 19 or step + 1 == r.steps or late:
            numbers = {k: short(x.tolist()) for k, x in found.items()}
            now = time.perf_counter()
            log.row(
                stage="drafter",
                step=step + 1,
                seconds=now - began,
                rate=factor,
                text=source.name,
                seconds_a_step=(now - last) / (step % 20 + 1),
                max_load=balance.worst()[0],
                **numbers,
            )
            last = now
        if (step + 1) % r.dev_every == 0 or step + 1 == r.steps or late:
            found = evaluate(model, data["dev"], r, compiled)
            log.row(stage="dev", step=step + 1, **{k: short(x) for k, x in found.items()})
            last = time.perf_counter()
        if late:
            log.row(stage="stopped", step=step + 1, seconds=stop_after)
            break
    return weights.finished(model, optimiser.masters())


def restart(model: Model, seed: int) -> None:
    """Fresh mtp weights, whatever the checkpoint held."""
    fresh = weights.stacked(model.config, weights.initial(model.config, seed))
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.startswith("mtp."):
                p.copy_(fresh[name])


def step_of(
    model: Model,
    recipe: Drafter,
    source: Source,
    optimiser: Optimiser,
    balance: Balance,
    compiled: bool,
    capture: bool,
    rounding: Rounding | None,
) -> Captured:
    """A training step on text of one kind: step(ids=[rows, length + 1], factor=, bias_rate=)."""
    r, device = recipe, model.device
    inputs = {
        "ids": torch.zeros(source.rows, source.length + 1, dtype=torch.long, device=device),
        "factor": torch.zeros((), device=device),
        "bias_rate": torch.zeros((), device=device),
    }
    held = [w for g in (*optimiser.muon, *optimiser.adam) for w in g.weights]
    constants: dict = {}

    def run() -> dict[str, Tensor]:
        tap = Training(r.dropout, "mtp.")
        slots = drafted(model, inputs["ids"], r, source.first, compiled, tap, constants=constants)
        draft_loss.loss(slots).backward()
        balance.step(tap.load, inputs["bias_rate"])
        norm = optimiser.step(inputs["factor"], rounding)
        for w in held:
            w.grad = None
        found = draft_loss.metrics(slots)
        return {
            "loss": found.loss,
            "accepted": found.accepted,
            "overlap": found.overlap,
            "as_target": found.as_target,
            "confidence": found.confidence,
            "grad": norm,
        }

    return Captured(run, inputs, capture)


def drafted(
    model: Model,
    ids: Tensor,
    r: Drafter,
    first: int,
    compiled: bool,
    tap: Training | None = None,
    generator: torch.Generator | None = None,
    constants: dict | None = None,
) -> draft_loss.Slots:
    """Drafter against target at random anchors from position `first` on, of ids [b, t+1]."""
    constants = {} if constants is None else constants
    n, w = model.config.dspark_block_size, model.config.sliding_window
    b, t = ids.shape[0], ids.shape[1] // w * w
    ids = ids[:, :t]
    each = max(1, min(r.anchors * r.rows // b, t - first - 1 - n))
    anchors = draft_loss.random_anchors(
        b, t - first, each, n, device=ids.device, generator=generator
    )
    anchors = draft_loss.Anchors(anchors.seq, anchors.last + first)
    ctx = fast.context(model.config, ids, compiled=compiled, dtype=model.dtype, constants=constants)
    ctx.batch = fast.without_logits(ctx.batch)
    with torch.no_grad():
        rows = model(ctx).rows
    constants.update(fast.constants_of(ctx))
    ctx.tap = tap
    return draft_loss.compare(model, rows, ids, anchors, ctx, n, compiled=compiled)


def _sources(
    model: Model,
    r: Drafter,
    data: dict[str, Split],
    seed: int,
    log: Log,
    compiled: bool,
    capture: bool,
) -> list[Source]:
    """The corpus; what the model wrote after short prompts, and so mostly about things that it was
    never shown; and what it goes on with greedily after half of that. On text that it was trained
    on it is far surer than it will ever be again: a drafter taught there learns too easy a task.
    """
    prompts = written.prompts([data["library"], data["tests"]], r.written, r.prompt, seed + 4)
    heat = torch.linspace(*r.temperatures, r.written)
    half = r.written_length // 2
    rows = max(1, min(r.rows * r.length // r.written_length, r.written))

    def write(name: str, starts: Tensor, heat: Tensor) -> Source:
        began = time.perf_counter()
        text = written.write(
            model,
            starts,
            r.written_length + 1 - starts.shape[1],
            heat,
            seed=seed,
            compiled=compiled,
            capture=capture,
        )
        first = starts.shape[1]
        own = text[:64, first:].tolist()
        log.row(
            stage="written",
            text=name,
            seconds=time.perf_counter() - began,
            tokens=text[:, first:].numel(),
            different=sum(len(set(row)) / len(row) for row in own) / len(own),
        )
        return Source(name, text, first, rows, r.written_length)

    sampled = write("sampled", prompts, heat)
    assert sampled.text is not None
    greedy = write("greedy", sampled.text[:, :half], torch.zeros(r.written))
    return [Source("corpus", None, 0, r.rows, r.length), sampled, greedy]


def _rows(
    source: Source, streams: list[Stream], renamed: float, order: torch.Generator, step: int
) -> Tensor:
    """[rows, length + 1] ids of a source; a half of the corpus rows is library text."""
    if source.text is None:
        shares = trained_shares(0.5, renamed)
        return torch.from_numpy(mixed(streams, shares, source.rows, source.length + 1, step))
    at = torch.randperm(len(source.text), generator=order)[: source.rows]
    return source.text[at.to(source.text.device)]


@torch.no_grad()
def evaluate(model: Model, split: Split, r: Drafter, compiled: bool) -> dict:
    """Metrics on a split, at the same anchors every time and whatever the rows of a step."""
    ids = torch.from_numpy(pieces(split, r.length + 1))[:DEV_ROWS].to(model.device)
    random = torch.Generator(model.device).manual_seed(0)
    full = compiled and len(ids) == r.rows
    r = replace(r, rows=len(ids))  # else the anchors would be as many as in a step
    found = draft_loss.metrics(drafted(model, ids, r, 0, full, generator=random)).numbers()
    return {k: x for k, x in found.items() if k not in ("cross_entropy", "confidence_loss")}


def short(x):
    """Numbers as a log keeps them."""
    return [round(v, 4) for v in x] if isinstance(x, list) else x
