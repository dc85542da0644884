"""What the experiment on replay has stored is of one full run, with floors and baselines, and its
page says that."""

import dataclasses
from collections import Counter
from pathlib import Path

import pytest

from deepinfer.tables.table import Table
from experiments.replay_error import findings, run, words
from experiments.replay_error.config import FULL
from experiments.replay_error.files import read_all
from experiments.replay_error.readme_tables import texts

HERE = Path(findings.HERE)


@pytest.fixture(scope="module")
def stored():
    return read_all(HERE / "results")


def test_readme_says_what_the_results_say(stored):
    text = (HERE / "README.md").read_text("utf-8")
    assert text.count("<!-- begin ") >= 10
    assert findings.filled(text, stored) == text
    wrong = text.replace("0.00", "0.01", 1)
    assert findings.filled(wrong, stored) != wrong


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


def changed(stored, part, where, policy, **values):
    """The results with other values in the rows of a policy."""
    tables = dict(stored[part].tables)
    rows = [
        r | values if policy in (r.get("policy"), r.get("second")) else r for r in tables[where]
    ]
    tables[where] = Table(rows)
    return stored | {part: dataclasses.replace(stored[part], tables=tables)}


@pytest.mark.parametrize(
    "part, where, policy, values",
    [
        ("keep", "summary", "n6 keep 76", dict(perplexity_ratio_low=1.001)),
        ("keep", "summary", "n6 keep 76", dict(kl_max=0.001)),
        ("keep", "pairs", "vLLM 96", dict(ratio_high=1.01)),
        ("keep", "pairs", "stairs 127", dict(ratio_high=1.01)),
        ("keep", "summary", "short 1", dict(length_change_high=0.1)),
        ("length", "pairs", "n6 keep 76 behind 1024", dict(ratio_low=1.1)),
        ("length", "pairs", "fidelity 0 behind 1920", dict(ratio_low=0.9)),
        ("sides", "pairs", "no replay", dict(ratio_low=0.9)),
        ("turns", "pairs", "chained turn 3", dict(difference_low=-1e-5)),
        ("turns", "pairs", "page given up turn 1", dict(difference_low=-1e-5)),
        ("prose", "summary", "n6 keep 76", dict(kl_low=0.5)),
        ("free", "divergence", "n6 keep 76", dict(diverged=3)),
        ("law", "summary", "n5 keep 315", dict(kl_max=1e-6)),
    ],
)
def test_a_finding_stops_where_the_results_do_not_bear_it(stored, part, where, policy, values):
    assert words.found(stored)
    with pytest.raises(AssertionError, match="the results do not say"):
        words.found(changed(stored, part, where, policy, **values))


def test_tables_of_the_keep_part_agree(stored):
    """The mean of a summary is that of its passages, which all have as many tokens; its interval holds it."""
    keep = stored["keep"].tables
    for row in keep["summary"]:
        found = [r["kl"] for r in keep["passages"] if r["policy"] == row["policy"]]
        assert sum(found) / len(found) == pytest.approx(row["kl"], rel=1e-9, abs=1e-15)
        assert row["kl_low"] <= row["kl"] <= row["kl_high"] and row["kl_median"] <= row["kl_max"]
