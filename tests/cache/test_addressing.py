"""Places agree with a model in plain Python: what is written for a position is read for it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch

import deepinfer
from deepinfer.cache import addressing
from deepinfer.checkpoint.tiny import tiny_config
from deepinfer.engine.step.batch import Work, build

CONFIG = tiny_config()
PAGE = 8
# (first position, rows of this step, state id); the second sequence begins here
SEQS = [(29, 3, 2), (0, 11, 1), (7, 1, 3), (40, 30, 5)]


def batch_of(seqs=SEQS):
    works = [
        Work(ids=[5] * n, start=start, state=state, pages=[10 * state + i for i in range(12)])
        for start, n, state in seqs
    ]
    return build(works, CONFIG)


class Rings:
    """Rings in plain Python: place -> (state id, position) that was written there last."""

    def __init__(self, ring, seqs):
        self.ring, self.held = ring, {}
        for start, _, state in seqs:
            for p in range(start):
                self.held[state * ring + p % ring] = (state, p)

    def write(self, batch, places):
        for row, place in enumerate(places.tolist()):
            if place >= 0:
                state = int(batch.state[batch.seq[row]])
                self.held[place] = (state, int(batch.positions[row]))


@pytest.mark.parametrize("ring", [9, 22, 64])
@pytest.mark.parametrize("window", [1, 4, 9])
def test_a_window_place_holds_the_key_of_its_position(ring, window):
    batch, rings = batch_of(), Rings(ring, SEQS)
    stored = 6 * ring
    places = addressing.window_places(
        batch, batch.row_set, batch.row_set, None, window, ring, stored
    )
    assert places.shape == (len(batch.seq), window)
    for row, found in enumerate(places.tolist()):
        seq, p = int(batch.seq[row]), int(batch.positions[row])
        start, _, state = SEQS[seq]
        for place, at in zip(found, range(p - window + 1, p + 1)):
            if at < 0:
                assert place == -1
            elif at >= start:  # a row of this step
                own = place - stored
                assert (int(batch.seq[own]), int(batch.positions[own])) == (seq, at)
            else:
                assert rings.held[place] == (state, at)


def test_without_history_only_rows_of_the_step_have_a_place():
    batch = batch_of([(0, 5, 1), (0, 3, 2)])
    rows = batch.row_set
    places = addressing.window_places(batch, rows, rows, None, 4, 1, 0)
    assert places[4].tolist() == [1, 2, 3, 4] and places[5].tolist() == [-1, -1, -1, 5]
    groups = addressing.group_places(batch, rows, 2, 1, 0)
    assert groups.tolist() == [[-1, 0], [0, 1], [1, 2], [2, 3], [3, 4], [-1, 5], [5, 6], [6, 7]]


def test_nothing_below_the_floor_and_no_padding_is_visible():
    batch = batch_of([(29, 3, 2), (7, 1, 3)])
    floor = torch.tensor([28, 0])
    places = addressing.window_places(batch, batch.row_set, batch.row_set, floor, 4, 22, 200)
    assert [(row >= 0).sum().item() for row in places] == [2, 3, 4, 4]
    padded = type(batch.row_set)(
        batch.positions, torch.full_like(batch.seq, -1), batch.row_set.first, batch.row_set.start
    )
    assert (addressing.window_places(batch, padded, padded, None, 4, 22, 200) == -1).all()
    assert (addressing.ring_writes(batch, padded, 22) == -1).all()
    start = padded.start
    assert (addressing.entry_writes(batch, padded, start, 2, PAGE // 2) == -1).all()


@pytest.mark.parametrize("ring", [4, 22])
def test_after_a_step_a_ring_holds_the_last_positions_of_every_sequence(ring):
    """Also behind a chunk that is longer than the ring, and no place is written twice."""
    batch, rings = batch_of(), Rings(ring, SEQS)
    places = addressing.ring_writes(batch, batch.row_set, ring)
    written = places[places >= 0].tolist()
    assert len(written) == len(set(written))
    rings.write(batch, places)
    for start, n, state in SEQS:
        low = addressing.ring_start(start + n, ring)
        run = addressing.ring_run(state, low, start + n, ring, torch.device("cpu"))
        assert [rings.held[p] for p in run.tolist()] == [(state, p) for p in range(low, start + n)]


def test_rows_below_lowest_are_not_written():
    batch = batch_of([(29, 3, 2), (7, 2, 3)])
    places = addressing.ring_writes(batch, batch.row_set, 22, torch.tensor([31, 0]))
    assert (places >= 0).tolist() == [False, False, True, True, True]


def test_a_draft_block_sees_the_context_before_it():
    state, positions = torch.tensor([2, 1]), torch.tensor([30, 3])
    places = addressing.context_places(state, positions, None, 5, 22)
    assert places[0].tolist() == [44 + p % 22 for p in range(25, 30)]
    assert places[1].tolist() == [-1, -1, 22, 23, 24]
    floored = addressing.context_places(state, positions, torch.tensor([28, 2]), 5, 22)
    assert (floored >= 0).sum(-1).tolist() == [2, 1]


@pytest.mark.parametrize("ratio", [1, 2, 4])
def test_an_entry_is_read_where_it_is_written(ratio):
    """Entries of this step as own rows, those before it in pages; together, each once."""
    per_page, stored = PAGE // ratio, 1000
    batch = batch_of()
    rows = batch.row_set
    writes = addressing.entry_writes(batch, rows, rows.start, ratio, per_page)
    for row, place in enumerate(writes.tolist()):
        p = int(rows.positions[row])
        assert (place >= 0) == ((p + 1) % ratio == 0)
        if place >= 0:
            number = (p + 1) // ratio - 1
            table = batch.pages[rows.seq[row]]
            assert place == int(table[p // PAGE]) * per_page + number % per_page
            read = addressing.entry_places(table[None], torch.tensor([[number]]), per_page)
            assert read.item() == place
            own = torch.tensor([[number]]), rows.seq[row : row + 1]
            last, at = addressing.own_entry_places(rows, *own, ratio, stored)
            assert (last.item(), at.item()) == (p, stored + row)
    closed = addressing.closes_entry(rows, ratio)
    assert closed.tolist() == (writes >= 0).tolist()
    assert addressing.entries_before(torch.arange(9), ratio).tolist() == [
        (p + 1) // ratio for p in range(9)
    ]


def test_entries_below_own_start_and_in_page_0_are_not_written():
    batch = batch_of([(0, 16, 1)])
    rows = batch.row_set
    writes = addressing.entry_writes(batch, rows, torch.tensor([8]), 2, 4)
    assert (writes >= 0).nonzero().flatten().tolist() == [9, 11, 13, 15]
    batch.pages.zero_()
    assert (addressing.entry_writes(batch, rows, rows.start, 2, 4) == -1).all()


def test_pages_in_whole_numbers():
    for size in (1, 3, 8):
        for tokens in range(30):
            ends = [e for e in range(1, tokens + 1) if e % size == 0]
            assert addressing.full_pages(tokens, size) == len(ends)
            assert addressing.page_end(tokens, size) == max(ends, default=0)
            assert addressing.pages_of(tokens, size) == len({p // size for p in range(tokens)})
            for start in range(tokens + 1):
                inside = [e for e in ends if e > start]
                assert list(addressing.page_ends(start, tokens, size)) == inside
                span = sum(e > start - size for e in ends)
                assert span <= addressing.most_page_ends(tokens - start, size)
            assert [addressing.ending_page(e, size) for e in ends] == list(range(len(ends)))
    assert addressing.full_pages(-5, 4) == addressing.page_end(-5, 4) == 0
    assert addressing.entry_blocks(5, 2, torch.device("cpu")).tolist() == [0, 0, 1, 1, 2]


def test_no_other_file_turns_a_position_into_a_place():
    """`% ring` and arithmetic with a page's size stand in cache/addressing.py alone."""
    root, told = Path(deepinfer.__file__).parent, []
    for folder in ("cache", "engine", "model", "slots", "conformance"):
        for file in sorted((root / folder).rglob("*.py")):
            if file.name == "addressing.py":
                continue
            for node in ast.walk(ast.parse(file.read_text("utf-8"))):
                if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Mod, ast.FloorDiv)):
                    by = ast.unparse(node.right).rpartition(".")[2]
                    if by in ("ring", "group_ring", "page_size", "entries_per_page", "per_page"):
                        told.append(f"{file.relative_to(root)}:{node.lineno}: {ast.unparse(node)}")
    assert not told, "\n".join(told)
