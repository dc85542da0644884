"""The nano report's drafts: texts that are written, and the laws of drafts on real text."""

import pytest
import torch

from experiments.nano.report import acceptance, drafts
from experiments.nano.train import fast
from experiments.nano.train.draft_loss import Anchors, compare

BOS = 0


def test_written_texts_are_the_engines_and_their_steps_add_up(eng, docs):
    prompts = drafts.contexts(docs, 5, 40)
    with drafts.drafting(eng) as drafter:
        found = drafts.write(drafter, prompts, 20, 0.0)
        plain = eng.generate([[BOS, *ids] for _, ids in prompts], temperature=0, max_tokens=25)
        again = drafter.generate([[BOS, *ids] for _, ids in prompts], temperature=0, max_tokens=25)
    for (module, _), w, a, b in zip(prompts, found, plain, again):
        assert w.module == module and w.tokens == a.token_ids[: len(w.tokens)]
        assert len(w.tokens) == 20 or a.token_ids[-1] == eng.config.eos_token_id
        by_step = {}
        for s in b.steps[1:]:
            by_step[s.step] = by_step.get(s.step, 0) + 1
        assert [s.emitted for s in w.steps] == list(by_step.values())[: len(w.steps)]
        ends = [1, *(s.start + s.emitted for s in w.steps)]
        assert [s.start for s in w.steps] == ends[:-1] and ends[-1] >= len(w.tokens)
    assert len({s.emitted for w in found for s in w.steps}) > 1


def test_laws_on_text_are_those_the_engine_drafts_with(eng, docs):
    """The first draft after a prompt follows the text, whatever is drawn: its law and confidence
    must be those of the block that starts at the prompt's end."""
    with drafts.drafting(eng, "rejection") as drafter:
        for start in (1, 9, 30):
            prompt = [BOS, *docs[1].ids[: start - 1]]
            request = drafter.add(prompt, max_tokens=8, temperature=1.0, seed=4)
            drafter.step()
            r = drafter.requests[request]
            fed = [*prompt, r.output[0], *docs[1].ids[:9]]
            law = next(acceptance.laws_on_text(drafter, fed, torch.tensor([start])))
            assert torch.allclose(law.draft[0, 0], r.draft.dists[0][0], atol=1e-9)
            assert float(law.confidence[0, 0]) == pytest.approx(r.draft.confidence[0])
            own = drafter.logits(fed)[start : start + eng.config.max_draft].softmax(-1)
            assert torch.allclose(law.target[0], own)
            drafter.abort(request)


def test_acceptance_is_what_the_drafters_loss_says(eng, docs):
    ids, n = [BOS, *docs[1].ids[:63]], eng.config.max_draft
    starts = torch.arange(1, len(ids) - n, 7)
    with drafts.drafting(eng) as drafter:
        laws = list(acceptance.laws_on_text(drafter, ids, starts))
    mine = torch.cat([torch.minimum(x.target, x.draft).sum(-1) for x in laws])
    text = torch.tensor([ids])
    ctx = fast.context(eng.config, text, dtype=torch.float64)
    anchors = Anchors(torch.zeros_like(starts), starts - 1)
    with torch.no_grad():
        theirs = compare(eng.model, eng.model(ctx).rows, text, anchors, ctx, n)
    assert torch.allclose(mine, theirs.overlap, atol=1e-8)
    assert torch.allclose(torch.cat([x.confidence for x in laws]), theirs.score.sigmoid())


def test_blocks_outside_the_text_are_refused(eng):
    with drafts.drafting(eng) as drafter, pytest.raises(ValueError, match="allow 1..3"):
        next(acceptance.laws_on_text(drafter, list(range(8)), torch.tensor([4])))
