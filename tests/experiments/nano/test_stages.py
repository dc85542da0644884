"""Both stages of training in miniature: they learn, hand over weights, and end as a checkpoint."""

import numpy as np
import pytest
import torch

from deepinfer.checkpoint.reader import Checkpoint
from deepinfer.checkpoint.tiny_tokenizer import tiny_tokenizer
from deepinfer.engine.engine import Engine
from experiments.nano.config import Backbone, Drafter, small_config
from experiments.nano.train import backbone, drafter, fast, weights, written
from experiments.nano.train.batches import Split, Stream, counts, mixed, pieces
from experiments.nano.train.log import Log, read


def counting(documents: int, seed: int) -> Split:
    """Texts that a model can learn: each counts up by its own step."""
    rng = np.random.default_rng(seed)
    docs = [
        np.concatenate([[0], 5 + (np.arange(50) * k % 20), [1]]).astype(np.uint16)
        for k in rng.integers(1, 4, documents)
    ]
    return Split(np.concatenate(docs), np.cumsum([0, *map(len, docs)]))


@pytest.fixture(scope="module")
def stages(tmp_path_factory):
    """(config, log rows, folder of the backbone, folder of both), trained in a few seconds."""
    folder = tmp_path_factory.mktemp("nano")
    tokenizer = tiny_tokenizer()
    config = small_config(tokenizer)
    data = dict(
        library=counting(40, 1),
        tests=counting(40, 2),
        dev=counting(10, 3),
        renamed=counting(40, 6),
    )
    log = Log(folder / "log.jsonl")
    model = weights.model_from(config, weights.initial(config, 0), tokenizer, torch.float32, "cpu")
    recipe = Backbone(
        steps=60, rows=2, length=64, dense_length=32, warmup=4, dev_every=30, rounded_from=0.8
    )
    held = backbone.train(model, recipe, data, seed=0, log=log)
    weights.write_both(folder / "one", config, weights.official(config, held), tokenizer)
    model = weights.model_of(Checkpoint.open(folder / "one" / "stored"), torch.float32, "cpu")
    recipe = Drafter(
        steps=40,
        rows=4,
        length=64,
        anchors=16,
        warmup=4,
        written=16,
        written_length=32,
        prompt=12,
        dev_every=20,
    )
    held = drafter.train(model, recipe, data, seed=0, log=log)
    weights.write_both(folder / "two", config, weights.official(config, held), tokenizer)
    return config, read(folder / "log.jsonl"), folder / "one", folder / "two"


def test_the_backbone_learns_the_text(stages):
    dev = [row for row in stages[1] if row["stage"] == "dev" and "nats" in row]
    assert dev[0]["step"] == 30 and dev[-1]["step"] == 60
    assert dev[-1]["nats"] < dev[0]["nats"] < np.log(1024)
    assert dev[-1]["nats"] < 2.5  # from where chance is 6.9


def test_the_drafter_learns_the_target(stages):
    dev = [row for row in stages[1] if row["stage"] == "dev" and "accepted" in row]
    assert dev[-1]["loss"] < dev[0]["loss"] < 1.6  # untrained: about 2.2
    assert dev[-1]["as_target"][0] > 0.2  # chance is 1 in 20


def test_the_second_stage_starts_from_the_stored_weights_and_leaves_them(stages):
    one, two = (Checkpoint.open(folder / "stored") for folder in stages[2:])
    for name in one.weights:
        a, b = (x.read(name, torch.float32) for x in (one, two))
        same = torch.equal(a, b)
        moved = name.startswith("mtp.") and not name.endswith(("hc_attn_scale", "hc_ffn_scale"))
        assert same != moved or name.startswith("mtp."), name
    a, b = ({n: x.read(n, torch.float32) for n in one.weights} for x in (one, two))
    changed = [n for n in a if not torch.equal(a[n], b[n])]
    assert changed and all(n.startswith("mtp.") for n in changed)


def test_stored_follows_from_unquantised(stages):
    stored, plain = (Checkpoint.open(stages[2] / x) for x in ("stored", "unquantised"))
    kind = {w.name: w.storage for w in stored.weights.values()}
    for name in plain.weights:
        value = plain.read(name, torch.float32)
        expected = weights.round_storage(value, kind[name])
        assert torch.equal(stored.read(name, torch.float32), expected), name


def test_an_engine_serves_what_training_wrote(stages):
    """The engine's own loss equals the training path's, and drafts leave the text as it is."""
    folder = stages[3] / "stored"
    with Engine.from_pretrained(str(folder), dtype="float64", max_model_len=128) as eng:
        ids = counting(3, 9).document(0).tolist()
        by_engine = eng.logits(ids)
        model = weights.model_of(Checkpoint.open(folder), torch.float64, "cpu")
        padded = torch.tensor([ids + [0] * (-len(ids) % 8)])
        with torch.no_grad():
            by_training = model(fast.context(model.config, padded, dtype=torch.float64)).logits
        torch.testing.assert_close(by_training[: len(ids)], by_engine, rtol=0, atol=1e-9)
        plain = eng.generate([ids[:20]], max_tokens=24, temperature=0)[0]
        drafted = eng.with_(verifier="fixed").generate([ids[:20]], max_tokens=24, temperature=0)[0]
        assert plain.token_ids == drafted.token_ids
        assert drafted.steps[-1].step < plain.steps[-1].step, "no draft was ever accepted"


def test_written_text_is_the_models_own(stages):
    """Greedy rows are the arg max of a teacher-forced pass; seeds repeat, and differ by seed."""
    model = weights.model_of(Checkpoint.open(stages[2] / "stored"), torch.float64, "cpu")
    starts = written.prompts([counting(9, 4), counting(9, 5)], 4, 16, seed=0)
    heat = torch.tensor([0.0, 1.0, 0.0, 1.0])
    text = written.write(model, starts, 16, heat, seed=1, prefill=3)
    assert torch.equal(text[:, :16], starts)
    with torch.no_grad():
        logits = model(fast.context(model.config, text, dtype=torch.float64)).logits.view(4, 32, -1)
    assert torch.equal(logits[::2, 15:31].argmax(2), text[::2, 16:])
    assert torch.equal(text, written.write(model, starts, 16, heat, seed=1, prefill=4))
    other = written.write(model, starts, 16, heat, seed=2, prefill=4)
    assert torch.equal(text[::2], other[::2]) and not torch.equal(text[1::2], other[1::2])
    # a prompt that ends inside a window
    short = written.write(model, starts[:, :13], 19, torch.zeros(4), seed=1)
    with torch.no_grad():
        logits = model(fast.context(model.config, short, dtype=torch.float64)).logits
        logits = logits.view(4, 32, -1)
    assert torch.equal(logits[:, 12:31].argmax(2), short[:, 13:])


# ------------------------------------------------------------------------------------ the parts


def test_dropout_only_touches_what_sub_layers_give():
    tap = backbone.Training(0.5)
    ones = torch.ones(64, 8)
    assert (tap("layers.3.attn.out", ones, None) == 0).any()
    for name in ("layers.3.attn.in", "layers.3.in", "mtp.0.attn.out", "logits"):
        assert torch.equal(tap(name, ones, None), ones)


def test_n_grams_are_passed_off_as_unseen_the_longest_first():
    """Nested by size, the same tokens in both layers, other n-grams' rows in their place."""
    tap = backbone.Training(0.0, unseen=(0.1, 0.3, 0.6))
    rows = torch.arange(4000)[:, None] * 6 + torch.arange(6)
    first, second = (tap(f"layers.{i}.engram.rows", rows, None) for i in (1, 4))
    changed = first != rows
    assert torch.equal(changed | (first == rows), torch.ones_like(changed))
    shares = changed.double().mean(0)
    expected = torch.tensor([0.1, 0.1, 0.3, 0.3, 0.6, 0.6], dtype=torch.float64)
    assert (shares - expected).abs().max() < 0.03
    assert (changed[:, 0] <= changed[:, 2]).all() and (changed[:, 2] <= changed[:, 4]).all()
    assert (first % 6 == torch.arange(6)).all(), "a row of another column"
    assert ((second != rows) == changed).double().mean() > 0.99


def test_noise_replaces_a_share_of_what_is_read():
    ids = torch.randint(5, 900, (4, 5000))
    read = backbone.noisy(ids, 0.2, 3)
    changed = read != ids
    assert (read[changed] == 3).all() and abs(changed.double().mean() - 0.2) < 0.02
    assert backbone.noisy(ids, 0.0, 3) is ids


def test_load_counts_rows_and_no_padding():
    ids = torch.tensor([[0, 2], [2, 1], [-1, -1]])
    assert backbone.expert_load(ids, 4).tolist() == [1, 1, 2, 0]


def test_balance_lifts_the_idle_and_lowers_the_busy():
    tokenizer = tiny_tokenizer()
    config = small_config(tokenizer)
    model = weights.model_from(config, weights.initial(config, 0), tokenizer, torch.float32, "cpu")
    balance = backbone.Balance(model.layers, ((0.5, 0.25), (1.0, 0.0)))
    ids = torch.tensor([[0, 1], [0, 1], [0, 2]])
    balance.step({"layers.3.ffn": ids}, balance.rate(0.5))
    bias = model.layers[3].ffn.gate.bias
    assert bias[0] == -0.25 and bias[7] == 0.25
    assert torch.equal(model.layers[3].ffn.gate.bias_vl, bias)
    balance.step({"layers.3.ffn": ids}, balance.rate(0.6))
    assert bias[0] == -0.25


def test_a_stream_gives_every_document_once_an_epoch():
    split = counting(7, 0)
    stream = Stream(split, seed=3)
    got = np.concatenate([stream.rows(1, 13)[0] for _ in range(200)])
    starts = (got == 0).sum()
    assert stream.epoch > 5 and abs(starts - 7 * len(got) / len(split.ids)) <= 7
    again = Stream(split, seed=3)
    assert np.array_equal(got[:130], np.concatenate([again.rows(1, 13)[0] for _ in range(10)]))


def test_mixed_rows_and_pieces():
    a, b = (Stream(counting(5, i), 0) for i in (1, 2))
    assert mixed([a, b], [0.75, 0.25], 4, 10).shape == (4, 10)
    split = counting(2, 0)
    assert np.array_equal(pieces(split, 25).flatten(), split.ids[:100])


@pytest.mark.parametrize("rows", [1, 4, 8, 16])
@pytest.mark.parametrize("shares", [[0.225, 0.55, 0.225], [0.98, 0.02], [0.3, 0.7], [1.0, 0.0]])
def test_rows_are_the_shares_over_the_steps(shares, rows):
    """Whole at each step, never a row or more away from the share, and right on average."""
    given = np.array([counts(shares, rows, step) for step in range(1000)])
    wanted = np.array(shares) * rows
    assert (given.sum(1) == rows).all() and (abs(given - wanted) < 1).all()
    assert (abs(given.cumsum(0) - wanted * np.arange(1, 1001)[:, None]) < 4).all()
    again, later = (counts(shares, rows, step) for step in (7, 7))
    assert again == later and counts([0.5, 0.5], rows * 2, 7) == [rows, rows]


def test_tokens_are_drawn_from_the_law_at_their_temperature():
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0])
    n = 20000
    for heat in (0.5, 1.0, 2.0):
        drawn = written.draw(logits.expand(n, 4), torch.full((n,), heat))
        shares = torch.bincount(drawn, minlength=4) / n
        assert (shares - (logits / heat).softmax(0)).abs().max() < 0.015, heat
    assert (written.draw(logits.expand(9, 4), torch.zeros(9)) == 0).all()


def test_first_weights_depend_on_seed_and_name_alone():
    config = small_config(tiny_tokenizer())
    first, again, other = (weights.initial(config, seed) for seed in (3, 3, 4))
    drawn = {n for n, x in first.items() if not torch.equal(x, other[n])}
    assert all(torch.equal(x, again[n]) for n, x in first.items())
    assert {n for n in first if weights.is_matrix(n)} <= drawn
    wider = weights.initial(config.replace(n_routed_experts=16), 3)
    assert all(torch.equal(x, wider[n]) for n, x in first.items() if "gate" not in n)
    same = [first[f"layers.{i}.attn.wq_a.weight"] for i in (0, 1)]
    assert not torch.equal(*same)
    for name, x in first.items():
        if name.endswith("attn_sink"):
            assert (x == 1).all(), "at 0 they stay unused"
