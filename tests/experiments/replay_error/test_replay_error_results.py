"""The stored results of the replay experiment are of one full run, with floors and baselines, and
the tables of its pages are made from them."""

import re
from collections import Counter

import pytest

from experiments.replay_error import run
from experiments.replay_error.config import FULL
from experiments.replay_error.files import read_all
from experiments.replay_error.readme_tables import BLOCKS, HERE, PAGES, filled, texts


@pytest.fixture(scope="module")
def stored():
    return read_all(HERE / "results")


def test_tables_say_what_the_results_say(stored):
    found = []
    for page in PAGES:
        text = (HERE / page).read_text("utf-8")
        assert filled(text, stored) == text
        wrong = text.replace("| 0.00", "| 0.01", 1)
        assert wrong != text and filled(wrong, stored) == text
        found += re.findall(r"<!-- begin (\w+) -->", text)
    assert sorted(found) == sorted(BLOCKS)
    with pytest.raises(ValueError, match="no table is named 'other'"):
        filled("<!-- begin other --> <!-- end other -->", stored)


def test_results_are_of_one_full_run(stored):
    assert set(stored) == set(run.PARTS)
    for part in stored.values():
        sizes = part.facts["sizes"]
        assert all(sizes[k] == v for k, v in FULL.of(part.name).items()), part.name
        assert part.facts["weights"] == stored["keep"].facts["weights"]
        assert "changes" not in part.facts["commit"], part.name
    assert sum(f.stat().st_size for f in (HERE / "results").glob("*.json")) < 2_500_000


def test_every_part_has_64_passages_of_24_modules(stored):
    """English has 23 topics in all. By length the same passages are behind every prompt."""
    assert set(stored) - {"law", "cost"} == {
        "keep",
        "floors",
        "sides",
        "turns",
        "length",
        "prose",
        "free",
    }
    for name in set(stored) - {"law", "cost"}:
        found = texts(stored, name)
        assert len(found) >= 64 and len(set(found.values())) >= (23 if name == "prose" else 24), (
            name
        )
    by_length = stored["length"].tables["texts"]
    assert Counter(by_length["prompt"]) == dict.fromkeys(FULL.lengths, 64)
    assert stored["cost"].facts["sizes"]["cost_repeats"] >= 3


def test_every_figure_has_its_floors_and_baselines(stored):
    floors = {"chunks", "fidelity 0", "fidelity 2", "top-k halved"}
    both = {"n6 keep 76", "vLLM 76", "short 1", "halo"}

    def policies(part, where="summary", key="policy"):
        return set(stored[part].tables[where][key])

    assert (
        policies("keep") >= both | {f"stairs {k}" for k in (76, 96, 127)}
        and policies("floors") == floors
    )
    assert policies("floors", "layers") == policies("floors", "distance") == floors - {"chunks"}
    for part in ("prose", "length"):
        assert policies(part) >= both and policies(part, "floors summary") == floors
    for row in stored["length"].tables["texts"]:
        prompt = row["prompt"]
        assert {
            r["policy"] for r in stored["length"].tables["floors summary"] if r["prompt"] == prompt
        } == floors
    assert policies("turns", key="way") >= floors | {"vLLM", "short 1", "page given up", "halo"}
    assert policies("sides") >= {
        "page given up",
        "no replay",
        "both, vLLM",
        "both, short 1",
        "halo",
    }
    assert texts(stored, "sides") == texts(stored, "floors") == texts(stored, "keep")
    assert policies("free", "divergence") == floors | both


def test_tables_of_the_keep_part_agree(stored):
    """The mean of a summary is that of its passages, which all have as many tokens; its interval holds it."""
    keep = stored["keep"].tables
    for row in keep["summary"]:
        found = [r["kl"] for r in keep["passages"] if r["policy"] == row["policy"]]
        assert sum(found) / len(found) == pytest.approx(row["kl"], rel=1e-9, abs=1e-15)
        assert row["kl_low"] <= row["kl"] <= row["kl_high"] and row["kl_median"] <= row["kl_max"]
