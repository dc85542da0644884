"""Draft blocks of the released reference: greedy, five tokens, at several places of each prompt."""

import pytest

from support import oracle
from support.model_rig import Sequence

TOLERANCE = 1e-4


def anchors(n):
    names = [k.split("/") for k in oracle.numbers("drafts") if k.endswith("/tokens")]
    return sorted(int(anchor) for _, length, anchor, _ in names if int(length) == n)


def check(got, n, anchor):
    logits, tokens, confidence = got
    expected = {
        k: oracle.numbers("drafts")[f"dspark/{n}/{anchor}/{k}"]
        for k in ("logits", "tokens", "confidence_released")
    }
    assert (logits - expected["logits"]).abs().max() <= TOLERANCE
    assert tokens.tolist() == expected["tokens"].tolist()
    score = expected["confidence_released"]  # what the sigmoid is taken of
    assert (confidence - score.sigmoid()).abs().max() <= TOLERANCE
    low = score < 3  # elsewhere float32 has too few digits left below 1
    assert (confidence.logit() - score)[low].abs().max() <= TOLERANCE


@pytest.mark.parametrize("n", [5, 127, 128, 129, 300, 700])
def test_draft_blocks(engine, n):
    """The prompt is fed up to the first anchor, drafted from, fed on to the next, and so on: a
    draft leaves nothing behind in the cache."""
    ids = oracle.prompts()[n]
    assert len(anchors(n)) >= 2
    with Sequence(engine, n) as sequence:
        for anchor in anchors(n):
            sequence.feed(ids[len(sequence.ids) : anchor])
            check(sequence.draft(ids[anchor]), n, anchor)


@pytest.mark.parametrize("n, anchor", [(129, 128), (300, 150)])
def test_a_context_written_token_by_token_drafts_the_same(engine, n, anchor):
    ids = oracle.prompts()[n]
    with Sequence(engine, n) as sequence:
        sequence.feed(ids[: anchor - 12])
        for at in range(anchor - 12, anchor):
            sequence.feed(ids[at : at + 1])
        check(sequence.draft(ids[anchor]), n, anchor)


def test_rejected_rows_leave_no_trace_in_the_drafters_context(engine):
    """Rows fed past the anchor and rolled back: the ring is addressed by position."""
    n, anchor = 128, 64
    ids = oracle.prompts()[n]
    with Sequence(engine, n) as sequence:
        sequence.feed(ids[:anchor])
        sequence.feed([7, 8, 9, 10])
        sequence.ids = sequence.ids[:anchor]
        check(sequence.draft(ids[anchor]), n, anchor)
