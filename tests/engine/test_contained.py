"""A fault that concerns one request ends that request: its salt, its keys, its place in the cache."""

import asyncio

import pytest

from support.pool import check_empty
from support.small import small_engine, stream

PROMPTS = [stream(n, 30 + n, high=90) for n in (45, 47, 41)]
RUN = dict(max_tokens=4, ignore_eos=True, temperature=0.0)
SOON = 15


def engine(**changes):
    return small_engine(
        "one layer", vocab=97, max_model_len=96, page_size=8, max_num_seqs=4, prefix_cache=True
    ).with_(**changes)


@pytest.fixture(scope="module")
def want():
    return [c.token_ids for c in engine().generate(PROMPTS, **RUN)]


def test_a_salt_that_has_no_bytes_is_refused_at_the_call():
    eng = engine()
    with eng.background() as bg:
        for call in (eng.generate, eng.add, eng.stream, bg.add, eng.astream):
            with pytest.raises(ValueError, match=r"salt='a\\ud800' is not valid Unicode: index 1"):
                call(PROMPTS[0], salt="a\ud800", **RUN)
            with pytest.raises(TypeError, match="salt=3: want None or a string"):
                call(PROMPTS[0], salt=3, **RUN)
        assert bg.add(PROMPTS[0], salt="\U0001f600", **RUN).result(SOON).error is None


def spoilt(plain, id):
    """A method of the prefix cache that fails for one request."""

    def method(request, *args, **kwargs):
        if request.id == id:
            raise ZeroDivisionError("no place in the cache")
        return plain(request, *args, **kwargs)

    return method


PLACES = ("match", "adopt", "keys", "register")


@pytest.mark.parametrize("place", PLACES)
def test_a_request_that_cannot_be_scheduled_ends_alone(want, monkeypatch, place):
    eng = engine()
    cache = eng.runtime.prefix_cache
    monkeypatch.setattr(cache, place, spoilt(getattr(cache, place), 1))
    ids = [eng.add(p, **RUN) for p in PROMPTS]
    done = {}
    while eng.requests:
        done |= {c.index: c for c in eng.step()}
    good, bad, last = (done[i] for i in ids)
    assert [good.token_ids, last.token_ids] == [want[0], want[2]] and not good.error
    assert isinstance(bad.error, ZeroDivisionError) and bad.finish_reason == "error"
    check_empty(eng)


@pytest.mark.parametrize("overlap", (False, True))
@pytest.mark.parametrize("place", PLACES)
def test_so_it_does_in_a_background(want, monkeypatch, place, overlap):
    eng = engine(overlap=overlap)
    cache = eng.runtime.prefix_cache
    monkeypatch.setattr(cache, place, spoilt(getattr(cache, place), 1))
    with eng.background() as bg:
        runs = [bg.add(p, **RUN) for p in PROMPTS]
        good, bad, last = (r.result(SOON) for r in runs)

        async def read():
            return [t.id async for t in eng.astream(PROMPTS[0], **RUN)]

        assert tuple(asyncio.run(read())) == want[0]
    assert [good.token_ids, last.token_ids] == [want[0], want[2]] and not good.error
    assert isinstance(bad.error, ZeroDivisionError)
    check_empty(eng)


def test_a_scheduler_that_keeps_asking_for_a_request_that_has_ended_is_told(monkeypatch):
    eng = engine()
    cache = eng.runtime.prefix_cache
    monkeypatch.setattr(cache, "match", spoilt(cache.match, 0))
    monkeypatch.setattr(eng.runtime.scheduler, "release", lambda request: None)
    monkeypatch.setattr(eng.runtime.scheduler, "recover", lambda requests: None)
    eng.add(PROMPTS[0], **RUN)
    with pytest.raises(ZeroDivisionError):
        eng.step()
