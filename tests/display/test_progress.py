"""A bar that is interrupted while it draws stops no other bar."""

import threading

import pytest

from deepinfer.display import progress
from support.small import small_engine

SOON = 15
tqdm = pytest.importorskip("tqdm.auto").tqdm
LONG = dict(max_tokens=6, ignore_eos=True, progress=True)


@pytest.fixture
def drawn(monkeypatch, capsys):
    """Bars are really made and draw."""
    monkeypatch.delenv("DI_DISPLAY", raising=False)
    return capsys


def elsewhere(work):
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(SOON)
    return not thread.is_alive()


def test_an_interrupt_inside_the_lock_of_a_bar_stops_nobody_else(drawn, monkeypatch):
    eng = small_engine("one layer", vocab=97, max_model_len=64)
    kind, armed = progress.with_own_lock(tqdm), [True]
    plain = kind.display

    def display(self, *args, **kwargs):
        if armed.pop() if armed else False:
            raise KeyboardInterrupt
        return plain(self, *args, **kwargs)

    monkeypatch.setattr(kind, "display", display)
    with pytest.raises(KeyboardInterrupt):
        eng.generate([[5, 6, 7]], **LONG)
    assert not armed and not eng.requests
    assert elsewhere(lambda: eng.generate([[5, 6, 7]], **LONG)), "a second generate waits for ever"
    assert elsewhere(lambda: tqdm(total=1).close())  # nor do the caller's own bars
    assert "generate" in drawn.readouterr().err


def test_the_lock_of_the_process_is_not_taken(drawn):
    """Held by another thread, as an interrupted bar of another library leaves it."""
    lock, held, done = tqdm.get_lock(), threading.Event(), threading.Event()

    def hold():
        with lock:
            held.set()
            done.wait(SOON)

    thread = threading.Thread(target=hold)
    thread.start()
    try:
        assert held.wait(SOON)

        def draw():
            with progress.bar(3, "generate", show=True) as shown:
                shown.update(3)

        assert elsewhere(draw)
    finally:
        done.set()
        thread.join()


def test_a_bar_stands_below_the_bars_of_a_loop(drawn):
    with tqdm(total=2) as outer, progress.bar(3, "generate", show=True) as inner:
        assert abs(inner.pos) == abs(outer.pos) + 1
    with progress.bar(3, "generate", show=True) as alone:
        assert alone.pos == 0
