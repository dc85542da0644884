"""What each step of a stage is given, and what one step does, on a model of random weights."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from deepinfer.checkpoint.tiny_tokenizer import tiny_tokenizer
from experiments.nano.config import Backbone, Drafter, small_config
from experiments.nano.train import backbone, draft_loss, drafter, fast, weights, written
from experiments.nano.train.batches import Split, Stream, pieces
from experiments.nano.train.log import Log, read
from experiments.nano.train.muon import Optimiser, schedule

TOKENIZER = tiny_tokenizer()
CONFIG = small_config(TOKENIZER)


def random_model(dtype=torch.float32):
    """With weights at which every mechanism moves the logits."""
    state = weights.initial(CONFIG, 0)
    for name in state:
        if name.endswith(("wo_b.weight", "w2.weight")):
            state[name] *= 10
        if name.endswith("engram.embed.weight"):
            state[name] *= 50
    return weights.model_from(CONFIG, state, TOKENIZER, dtype, "cpu")


def random_text(low, high, seed=0, documents=30):
    """Documents of tokens in low .. high - 1: what a row is made of tells where it is from."""
    rng = np.random.default_rng(seed)
    docs = [np.r_[0, rng.integers(low, high, 60), 1].astype(np.uint16) for _ in range(documents)]
    return Split(np.concatenate(docs), np.cumsum([0, *map(len, docs)]))


DATA = dict(
    library=random_text(5, 100),
    tests=random_text(500, 600),
    dev=random_text(700, 800, documents=9),
    renamed=random_text(300, 400),
)


def rows_from(ids, low, high):
    """How many rows of ids [n, t] have a token in low .. high - 1."""
    return int(((ids >= low) & (ids < high)).any(1).sum())


class Plan(list):
    """Stands for `step_of`: keeps what every step was made of and called with, and does nothing."""

    def __init__(self, numbers, **shapes):
        super().__init__()
        self.numbers = numbers
        self.dev = []

    def evaluate(self, model, split, *_):
        self.dev.append((len(self), split))
        return {"loss": 0.0}

    def backbone(
        self, model, recipe, optimiser, balance, compiled, capture, rounding=None, dense=False
    ):
        self._see(optimiser, balance)
        return self._step(rounded=rounding is not None, dense=dense, recipe=recipe)

    def drafter(self, model, recipe, source, optimiser, balance, compiled, capture, rounding):
        self._see(optimiser, balance)
        return self._step(rounded=rounding is not None, source=source)

    def _see(self, optimiser, balance):
        self.optimiser = optimiser
        balance.step({n: torch.zeros(1, 1, dtype=torch.long) for n in balance.gates}, 0.0)

    def _step(self, **made):
        def step(**values):
            self.append({**made, **values})
            return {n: torch.zeros(()) for n in self.numbers}

        return step


def check_optimiser(plan, recipe, sink_rate):
    """Rates, decays and clip are the recipe's."""
    assert plan.optimiser.clip == recipe.clip
    assert {(g.rate, g.decay) for g in plan.optimiser.muon} == {
        (recipe.muon_rate, recipe.muon_decay)
    }
    for group in plan.optimiser.adam:
        sinks = group.names[0].endswith("attn_sink")
        assert group.rate == (sink_rate if sinks else recipe.adam_rate)
        assert group.decay in (0.0, recipe.adam_decay)
    assert max(g.decay for g in plan.optimiser.adam) == recipe.adam_decay


# ---------------------------------------------------------------------------------- the backbone


def backbone_plan(monkeypatch, recipe, log=Log(), **settings):
    plan = Plan(("nats", "index_kl", "grad"))
    monkeypatch.setattr(backbone, "step_of", plan.backbone)
    monkeypatch.setattr(backbone, "evaluate", plan.evaluate)
    backbone.train(random_model(), recipe, DATA, seed=0, log=log, **settings)
    return plan


RECIPE = Backbone(
    steps=20,
    rows=4,
    length=64,
    dense=0.3,
    dense_length=16,
    rounded_from=0.8,
    warmup=4,
    dev_every=7,
    index_every=4,
    library_shares=((0.5, 0.25), (1.0, 0.75)),
    renamed=0.0,
    bias_rates=((0.5, 0.1), (1.0, 0.0)),
    adam_decay=0.3,
    clip=2.0,
)


def test_the_steps_of_the_backbone_are_those_of_the_recipe(monkeypatch):
    plan = backbone_plan(monkeypatch, RECIPE)
    assert len(plan) == 20
    for i, step in enumerate(plan):
        dense, late = i < 6, i >= 10
        rows, length = (16, 16) if dense else (4, 64)
        assert step["dense"] == dense and step["ids"].shape == (rows, length + 1)
        assert (step["recipe"].rows, step["recipe"].length) == (rows, length)
        assert rows_from(step["ids"], 5, 100) == rows * (3 if late else 1) // 4
        assert rows_from(step["ids"], 500, 600) == rows * (1 if late else 3) // 4
        assert step["rounded"] == (i >= 16)
        assert step["bias_rate"] == (0.0 if late else 0.1)
        assert step["factor"] == schedule(i, 20, 4, RECIPE.constant, RECIPE.last)
    assert {step["phase"] for step in plan} == {0, 1, 2, 3}
    check_optimiser(plan, RECIPE, RECIPE.sink_rate)
    assert [at for at, _ in plan.dev] == [7, 14, 20]
    assert all(split is DATA["dev"] for _, split in plan.dev)


def test_a_share_of_the_library_rows_has_other_names(monkeypatch, tmp_path):
    """Less than a row a step here: right over the steps, and at no cost for the test suites."""
    recipe = replace(RECIPE, steps=200, library_shares=((1.0, 0.5),), renamed=0.2)
    plan = backbone_plan(monkeypatch, recipe, Log(tmp_path / "log"))
    spans = ((5, 100), (500, 600), (300, 400))
    found = np.array([[rows_from(s["ids"], *span) / len(s["ids"]) for span in spans] for s in plan])
    assert (found[:, 1] == 0.5).all() and (found.sum(1) == 1).all()
    assert np.allclose(found.mean(0), [0.4, 0.5, 0.1], atol=0.01)
    last = [row for row in read(tmp_path / "log") if row["stage"] == "backbone"][-1]
    assert last["renamed_epochs"] > 1 and last["library_epochs"] > 1 and last["tests_epochs"] > 1
    plan = backbone_plan(monkeypatch, replace(recipe, steps=5, renamed=1.0))
    assert not sum(rows_from(step["ids"], 5, 100) for step in plan)


def test_a_stage_ends_when_its_time_is_over(monkeypatch, tmp_path):
    plan = backbone_plan(monkeypatch, RECIPE, Log(tmp_path / "log"), stop_after=0.0)
    assert len(plan) == 1 and [at for at, _ in plan.dev] == [1]
    stages = [row["stage"] for row in read(tmp_path / "log")]
    assert stages == ["backbone", "dev", "stopped"]
    assert len(backbone_plan(monkeypatch, RECIPE, stop_after=1e6)) == 20


@pytest.mark.parametrize("stage", [backbone, drafter], ids=["backbone", "drafter"])
def test_a_stage_computes_with_rounded_weights_and_returns_the_masters(stage):
    model = random_model()
    recipe = Backbone(
        steps=3, rows=1, length=32, dense=0.3, dense_length=16, warmup=1, rounded_from=0.6
    )
    if stage is drafter:
        recipe = Drafter(
            steps=3, rows=1, length=32, anchors=8, written=2, written_length=24, prompt=8, warmup=1
        )
    held = stage.train(model, recipe, DATA, seed=0, log=Log())
    kind, between = weights.storages(CONFIG), 0
    assert model.config == CONFIG, "else nobody knows how its weights will be stored"
    for name, p in model.named_parameters():
        assert held[name].dtype == torch.float32
        if name.startswith("mtp.") != (stage is drafter) or "gate.bias" in name:
            continue
        assert torch.equal(p, weights.round_storage(held[name], kind[name])), name
        between += kind[name] != "f32" and not torch.equal(p, held[name])
    assert between > 25, "masters on the grid of the stored values"


def optimiser_of(model, draft, rate=0.0):
    """Of the weights that the stage trains."""
    held = {
        n: p.requires_grad_()
        for n, p in model.named_parameters()
        if n.startswith("mtp.") == draft and "gate.bias" not in n
    }
    return Optimiser(held, weights.is_matrix, (rate, rate), (0.0, 0.0))


IDS = torch.randint(5, 900, (2, 33), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def model():
    return random_model(torch.float64)


def backbone_step(model, dense=False, **changes):
    """What a step that leaves the weights alone finds."""
    quiet = dict(dropout=0.0, unseen=(), noise=0.0) | changes
    recipe = Backbone(rows=2, length=32, index_random=4, **quiet)
    opt, balance = optimiser_of(model, False), backbone.Balance(model.layers, recipe.bias_rates)
    step = backbone.step_of(model, recipe, opt, balance, False, False, dense=dense)
    return step(ids=IDS, phase=1, factor=0.0, bias_rate=0.0)["nats"].item()


@torch.no_grad()
def nats(model, read, dense=False):
    logits = model(fast.context(CONFIG, read, dtype=model.dtype, dense=dense)).logits
    return F.cross_entropy(logits, IDS[:, 1:].flatten()).item()


def test_a_backbone_step_is_the_loss_of_the_next_token(model):
    plain, dense = (nats(model, IDS[:, :-1], d) for d in (False, True))
    assert backbone_step(model) == pytest.approx(plain, abs=1e-9)
    assert backbone_step(model, dense=True) == pytest.approx(dense, abs=1e-9)
    assert abs(plain - dense) > 1e-3, "dense attention is not tested"


def test_a_backbone_step_balances_its_own_experts_and_moves_with_its_factor():
    model = random_model()
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    recipe, balance = Backbone(rows=2, length=32), backbone.Balance(model.layers, ())
    opt = optimiser_of(model, False, 1e-2)
    step = backbone.step_of(model, recipe, opt, balance, False, False)
    for factor, moves in ((0.0, False), (1.0, True)):
        step(ids=IDS, phase=1, factor=factor, bias_rate=0.25 * (1 - factor))
        same = {n for n, p in model.named_parameters() if torch.equal(p, before[n])}
        trained = {n for n in before if not n.startswith("mtp.") and "gate.bias" not in n}
        assert trained.isdisjoint(same) if moves else trained <= same
        assert {n for n in before if n.startswith("mtp.")} <= same
    for layer in model.layers:
        bias = layer.ffn.gate.bias
        assert set(bias.unique().tolist()) <= {-0.25, 0.0, 0.25} and bias.any()


@pytest.mark.parametrize("phase", [0, 3])
def test_a_backbone_step_looks_at_the_queries_of_its_phase(model, phase):
    recipe = Backbone(rows=2, length=32, index_random=0, dropout=0.0, unseen=())
    opt, balance = optimiser_of(model, False), backbone.Balance(model.layers, recipe.bias_rates)
    step = backbone.step_of(model, recipe, opt, balance, False, False)
    found = step(ids=IDS, phase=phase, factor=0.0, bias_rate=0.0)["index_kl"].item()
    loss = fast.IndexLoss(recipe.index_every, 0, phase)
    with torch.no_grad():
        model(fast.context(CONFIG, IDS[:, :-1], dtype=model.dtype, index_loss=loss))
    assert found == pytest.approx(sum(loss.terms().values()).item(), abs=1e-9)


def test_noise_is_read_and_never_predicted(model):
    """All of it noise: then nothing is left to read, and what is to be predicted is as before."""
    wanted = nats(model, torch.full((2, 32), CONFIG.dspark_noise_token_id))
    assert backbone_step(model, noise=1.0) == pytest.approx(wanted, abs=1e-9)
    assert abs(wanted - nats(model, IDS[:, :-1])) > 1e-3


@pytest.mark.parametrize("change", [dict(dropout=0.5), dict(unseen=(1.0, 1.0, 1.0))], ids=str)
def test_a_backbone_step_is_regularised(model, change):
    assert abs(backbone_step(model, **change) - nats(model, IDS[:, :-1])) > 1e-3


def test_evaluation_is_the_mean_over_the_whole_split(model):
    """Of seven pieces, three at a time, the last alone; without any regulariser."""
    split = random_text(5, 900, seed=4, documents=4)
    recipe = Backbone(rows=3, length=32)
    found = backbone.evaluate(model, split, recipe, False)
    ids = torch.from_numpy(pieces(split, 33))
    with torch.no_grad():
        logits = model(fast.context(CONFIG, ids[:, :-1], dtype=model.dtype)).logits
    assert found["pieces"] == len(ids) == 7
    wanted = F.cross_entropy(logits, ids[:, 1:].flatten()).item()
    assert found["nats"] == pytest.approx(wanted, abs=1e-9)


# ------------------------------------------------------------------------------------ the drafter


DRAFTER = Drafter(
    steps=200,
    rows=4,
    length=64,
    warmup=4,
    dev_every=90,
    rounded_from=0.6,
    written=12,
    written_length=32,
    prompt=10,
    bias_rates=((0.5, 0.1), (1.0, 0.0)),
    adam_decay=0.3,
    clip=2.0,
)


def draft_plan(recipe):
    """(plan, calls of written.write, weights before, weights after) of a drafter stage."""
    calls, plan = [], Plan(("loss", "accepted", "overlap", "as_target", "confidence", "grad"))

    def write(model, starts, length, heat, **_):
        calls.append((starts, heat))
        own = torch.randint(*((800, 850), (850, 900))[len(calls) - 1], (len(starts), length))
        return torch.cat([starts, own], 1)

    model = random_model()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.startswith("mtp."):
                p.add_(0.5)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(drafter, "step_of", plan.drafter)
        patch.setattr(drafter, "evaluate", plan.evaluate)
        patch.setattr(written, "write", write)
        after = drafter.train(model, recipe, DATA, seed=5, log=Log())
    return plan, calls, before, after


@pytest.fixture(scope="module")
def drafted():
    return draft_plan(DRAFTER)


def test_the_drafter_starts_afresh_and_leaves_the_backbone(drafted):
    _, _, before, after = drafted
    fresh = weights.stacked(CONFIG, weights.initial(CONFIG, 5))
    assert before.keys() == after.keys()
    for name, x in after.items():
        assert torch.equal(x, (fresh if name.startswith("mtp.") else before)[name]), name


def test_a_drafter_goes_on_from_the_checkpoints():
    _, _, before, after = draft_plan(replace(DRAFTER, steps=2, fresh=False))
    for name, x in after.items():
        assert torch.equal(x, before[name]), name


def test_the_drafter_learns_from_three_kinds_of_text(drafted):
    plan, calls, _, _ = drafted
    assert len(plan) == DRAFTER.steps
    text = {step["source"].name: step["source"] for step in plan}
    assert list(map(text.get, ("corpus", "sampled", "greedy"))) == sorted(
        text.values(), key=lambda s: s.first
    )
    starts = {"corpus": 0, "sampled": 10, "greedy": 16}
    for (name, first), share in zip(starts.items(), DRAFTER.shares):
        steps = [step for step in plan if step["source"].name == name]
        assert abs(len(steps) / len(plan) - share) < 0.1, name
        assert text[name].first == first
        used = set()
        for step in steps:
            ids = step["ids"]
            assert ids.shape == (text[name].rows, text[name].length + 1)
            if name == "corpus":
                assert rows_from(ids, 5, 100) == rows_from(ids, 300, 400) == 1
                assert rows_from(ids, 500, 600) == 2
            else:
                same = (ids[:, None] == text[name].text).all(2)
                assert same.any(1).all() and same.any(0).sum() == len(ids), "rows of the text, once"
                used |= set(same.int().argmax(1).tolist())
        assert name == "corpus" or used == set(range(12)), "some of the text is never learnt"
    assert rows_from(text["sampled"].text, 850, 900) == 0 and text["sampled"].rows == 8


def test_a_share_of_the_drafters_library_rows_has_other_names():
    """Half of the rows is library text, over the steps where a step has too few to share."""
    source = drafter.Source("corpus", None, 0, 3, 40)
    names, spans = ("library", "tests", "renamed"), ((5, 100), (500, 600), (300, 400))
    for renamed, wanted in ((0.2, (0.4, 0.5, 0.1)), (0.0, (0.5, 0.5, 0.0))):
        streams = [Stream(DATA[n], 0) for n in names[: 3 if renamed else 2]]
        rows = [drafter._rows(source, streams, renamed, torch.Generator(), i) for i in range(200)]
        assert all(ids.shape == (3, 41) for ids in rows)
        found = [np.mean([rows_from(ids, *span) / 3 for ids in rows]) for span in spans]
        assert np.allclose(found, wanted, atol=0.01)


def test_what_the_target_is_asked_to_write(drafted):
    """Short prompts at rising temperatures, and half of what came of them, greedily."""
    plan, ((prompts, heat), (starts, cold)), _, _ = drafted
    sampled = next(step["source"] for step in plan if step["source"].name == "sampled")
    assert prompts.shape == (12, 10) and (prompts[:, 0] == 0).all()
    assert torch.allclose(heat, torch.linspace(0.6, 1.0, 12))
    assert torch.equal(starts, sampled.text[:, :16]) and not cold.any() and len(cold) == 12


def test_the_steps_of_the_drafter_are_those_of_the_recipe(drafted):
    plan = drafted[0]
    for i, step in enumerate(plan):
        assert step["rounded"] == (i >= 120)
        assert step["bias_rate"] == (0.1 if i < 100 else 0.0)
        assert step["factor"] == schedule(i, 200, 4, DRAFTER.constant, DRAFTER.last)
    check_optimiser(plan, DRAFTER, DRAFTER.adam_rate)
    assert [at for at, _ in plan.dev] == [90, 180, 200]
    assert all(split is DATA["dev"] for _, split in plan.dev)


def drafter_step(model, first=0, rounding=None, rate=0.0, **changes):
    """(what a step finds, its optimiser): drafts at every place there is, half the rate."""
    recipe = Drafter(rows=2, length=32, anchors=99, **(dict(dropout=0.0) | changes))
    source = drafter.Source("", None, first, 2, 32)
    opt, balance = optimiser_of(model, True, rate), backbone.Balance(model.mtp, recipe.bias_rates)
    step = drafter.step_of(model, recipe, source, opt, balance, False, False, rounding)
    return step(ids=IDS, factor=0.5, bias_rate=0.25), opt


@pytest.mark.parametrize("first", [0, 20])
def test_drafts_count_from_where_the_models_own_text_starts(monkeypatch, first):
    """Every place from there to the last with room for a block and the token behind it."""
    seen = []
    compare = draft_loss.compare
    monkeypatch.setattr(
        draft_loss,
        "compare",
        lambda m, rows, ids, anchors, *a, **k: (
            seen.append(anchors),
            compare(m, rows, ids, anchors, *a, **k),
        )[1],
    )
    drafter_step(random_model(), first)
    n = CONFIG.dspark_block_size
    for s in range(2):
        assert sorted(seen[0].last[seen[0].seq == s].tolist()) == list(range(first, 32 - 1 - n))


def test_a_drafter_step_balances_its_own_experts_and_no_others():
    model = random_model()
    drafter_step(model)
    for layer in model.layers:
        assert not layer.ffn.gate.bias.any()
    for layer in model.mtp:
        bias = layer.ffn.gate.bias
        assert set(bias.unique().tolist()) <= {-0.25, 0.0, 0.25} and bias.any()
        assert torch.equal(layer.ffn.gate.bias_vl, bias)


def test_a_drafter_step_rounds_its_weights_and_keeps_masters():
    model = random_model()
    before = model.mtp[-1].norm.weight.detach().clone()
    _, opt = drafter_step(model, rounding=weights.rounding(CONFIG), rate=1e-3)
    kind, between = weights.storages(CONFIG), 0
    held = dict(model.named_parameters())
    # AdamW's first step is as long as its rate
    moved = opt.masters()[f"mtp.{len(model.mtp) - 1}.norm.weight"] - before
    assert moved.abs().max().item() == pytest.approx(0.5e-3, rel=1e-3)
    for name, master in opt.masters().items():
        assert torch.equal(held[name], weights.round_storage(master, kind[name])), name
        between += not torch.equal(held[name], master)
    assert between > 20


def test_a_drafter_step_drops_out():
    losses = [drafter_step(random_model(), dropout=d)[0]["loss"].item() for d in (0.0, 0.0, 0.5)]
    assert losses[0] == pytest.approx(losses[1], abs=1e-5) and abs(losses[2] - losses[0]) > 1e-4


def test_the_drafters_evaluation_repeats_itself_on_the_split_it_is_given(model):
    """On as many places, whatever the rows of a step."""
    recipe, found = Drafter(length=32, anchors=6), []
    for seed, rows, name in ((0, 2, "dev"), (1, 5, "dev"), (1, 2, "tests")):
        torch.manual_seed(seed)
        found.append(drafter.evaluate(model, DATA[name], replace(recipe, rows=rows), False))
    ids = torch.from_numpy(pieces(DATA["dev"], 33))[: drafter.DEV_ROWS]
    same = torch.Generator().manual_seed(0)
    whole = drafter.drafted(model, ids, replace(recipe, rows=len(ids)), 0, False, generator=same)
    assert whole.overlap.shape[0] == 6 * len(ids)
    wanted = draft_loss.metrics(whole).numbers()
    assert found[0] == found[1] != found[2]
    for key in ("loss", "accepted", "overlap", "as_target"):
        assert found[0][key] == pytest.approx(wanted[key], abs=1e-9), key


# ------------------------------------------------------------------------------------ written text


def test_prompts_start_with_bos_and_are_of_each_split():
    ids = written.prompts([DATA["library"], DATA["tests"]], 7, 10, seed=3)
    assert ids.shape == (7, 10) and (ids[:, 0] == 0).all()
    assert rows_from(ids[:, 1:], 5, 100) == 4 and rows_from(ids[:, 1:], 500, 600) == 3
    assert not torch.equal(ids, written.prompts([DATA["library"], DATA["tests"]], 7, 10, seed=4))


def test_text_is_written_at_fidelity_1():
    """With a cache that rounds what it keeps: the first token, of the prompt's forward, and the
    others, of one-row steps, are those of a forward with roundings, and not of one without."""
    model, n, p, length = random_model(torch.float64), 24, 16, 8
    starts = torch.randint(5, 900, (n, p))
    text = written.write(model, starts, length, torch.zeros(n), seed=0)
    with torch.no_grad():
        rounded, exact = (
            model(fast.context(CONFIG, text, dtype=torch.float64, fidelity=f))
            .logits.view(n, p + length, -1)[:, p - 1 : -1]
            .argmax(2)
            for f in (1, 0)
        )
    assert torch.equal(text[:, p:], rounded)
    differs = exact != rounded
    assert differs[:, 0].any() and differs[:, 1:].any(), "fidelity is not tested"
