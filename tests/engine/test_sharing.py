"""What the documents say of prompts that begin alike: shared once an earlier step has computed it."""

from support.small import small_engine, stream

HEAD = stream(60, 30, high=90)


def test_prompts_of_one_step_share_nothing_and_later_ones_do():
    eng = small_engine(
        "one layer",
        vocab=97,
        max_model_len=128,
        page_size=8,
        max_num_seqs=4,
        prefix_cache=True,
        max_num_batched_tokens=512,
    )
    prompts = [[*HEAD, *stream(30, n, high=90)] for n in range(4)]
    how = dict(max_tokens=2, ignore_eos=True, seed=1)
    together = eng.generate(prompts[:3], **how)
    assert [c.cached_tokens for c in together] == [0, 0, 0]
    (later,) = eng.generate(prompts[3], **how)
    assert later.cached_tokens > 0
    eng.clear_cache()
    first, *rest = (eng.generate(p, **how)[0].cached_tokens for p in prompts)
    assert first == 0 < min(rest)  # one after another
