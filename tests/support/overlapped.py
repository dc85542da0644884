"""Overlapped engines to test, what they have to write, and a drafter that is right now and then."""

from __future__ import annotations

import functools

import pytest
import torch

from deepinfer.engine.sampling_params import SamplingParams
from deepinfer.model.drafter import Drafter
from deepinfer.slots.protocols import Draft
from deepinfer.slots.verifier import BaseVerifier
from support.small import poison, small_engine, stream

VOCAB = 97
PROMPTS = [stream(n, 20 + n, high=90) for n in (9, 17, 5, 12, 30, 3)]
PARAMS = [
    SamplingParams(temperature=t, seed=70 + i, max_tokens=26 - 3 * i, ignore_eos=True)
    for i, t in enumerate((0.0, 1.0, 0.7, 0.0, 1.0, 0.0))
]


def engine(layout: str = "two layers", overlap: bool = True, **changes):
    settings = {"max_model_len": 64, "page_size": 8, "max_num_seqs": 6, **changes}
    eng = small_engine(layout, vocab=VOCAB, overlap=overlap, **settings)
    poison(eng.runtime.cache)
    return eng


@functools.cache
def serial(layout: str = "two layers"):
    return engine(layout, overlap=False).generate(PROMPTS, PARAMS)


def same(got, want) -> None:
    for a, b in zip(got, want, strict=True):
        assert a.error is None and a.token_ids == b.token_ids
        assert a.finish_reason == b.finish_reason
        assert a.logprobs == pytest.approx(b.logprobs, abs=1e-9)
        assert len(a.steps) == len(a.token_ids)


class Knowing:
    """A drafter that knows the text and is wrong behind a depth of its own choice, so that every
    number of drafts is accepted. Nobody has to look at the rows that it was asked with."""

    def __init__(self, patch, texts: dict[int, tuple[int, ...]]) -> None:
        self.texts, self.asked = texts, []
        self.right: int | None = None  # drafts that are right; None: as said
        patch.setattr(Drafter, "propose", self.propose)

    def propose(self, tokens, positions, n, ctx, sampler, params, keys, keep=False) -> Draft:
        drafts, confidence = [], []
        self.asked.append(len(tokens))
        for seed, out in zip(keys.seed.tolist(), keys.position.tolist()):
            text = (*self.texts[seed], *[0] * n)[out : out + n] if seed in self.texts else ()
            text = (*text, *[0] * (n - len(text)))
            depth = (seed + 5 * out) % (n + 1) if self.right is None else self.right
            drafts.append([t if k < depth else (t + 1) % 90 for k, t in enumerate(text)])
            confidence.append([0.95 if k < depth else 0.3 for k in range(n)])
        drafted, sure = torch.tensor(drafts), torch.tensor(confidence)
        return Draft(drafted, sure, torch.zeros_like(sure))


@pytest.fixture
def knowing(monkeypatch):
    texts = {p.seed: c.token_ids for p, c in zip(PARAMS, serial())}
    return Knowing(monkeypatch, texts)


class Half(BaseVerifier):
    """Half of the rows that it could have, the likeliest drafts first: depths differ by sequence."""

    max_draft = 5

    def budget(self, stale, cost):
        b, n = stale.shape
        return b + (b * n) // 2
