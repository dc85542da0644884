"""display/schedule.py: notes of what a scheduler did, and their picture."""

import pytest

import deepinfer as di
from deepinfer.display import schedule


@pytest.fixture(scope="module")
def tiny():
    return di.Engine.tiny(max_num_seqs=4, dtype="float64")


def test_watch_notes_every_step_of_every_request(tiny):
    eng = tiny.with_(max_num_batched_tokens=16)
    requests, notes = schedule.watch(eng, [(0, [5] * 8, 3), (1, [7] * 20, 2)])
    assert notes == ["PhhDD", " PPD"]
    assert [len(r.output) for r in requests] == [3, 2]
    assert len(notes[0]) == eng.stats.steps


def test_watch_notes_waiting_and_preemption(tiny):
    eng = tiny.with_(num_pages=6, page_size=16)
    _, notes = schedule.watch(eng, [(0, [5] * 50, 14), (2, [7] * 40, 3)])
    assert set(notes[1].strip()) == {".", "P", "D"}  # the pool has no pages for it at first
    eng = tiny.with_(num_pages=3, page_size=16)
    _, notes = schedule.watch(eng, [(0, [5] * 10, 24), (0, [7] * 10, 24)])
    assert any("x" in line for line in notes)


@pytest.mark.parametrize(
    ("notes", "steps"), [(["PDDD"], 0), (["PDhhD", "PhD"], 2), (["PPhD"], 1), (["PDxPD"], 0)]
)
def test_longest_pause(notes, steps):
    assert schedule.longest_pause(notes) == steps


def test_draw_has_a_panel_a_run_and_a_bar_a_step():
    plt = pytest.importorskip("matplotlib.pyplot")
    plt.switch_backend("agg")
    schedule.draw(a_batch=["PD", " PD"], other=["P.hx"])
    panels = plt.gcf().axes
    assert [ax.get_title() for ax in panels] == ["a batch", "other"]
    assert [len(ax.patches) for ax in panels] == [4, 4]
    assert [text.get_text() for text in plt.gcf().legends[0].get_texts()] == [
        "prompt rows",
        "a decode row",
        "holds pages, has no row",
        "is preempted",
        "waits",
    ]
    plt.close("all")
