"""What a finding needs: rows and pairs by name, and a stop where the results do not bear it out."""

from __future__ import annotations

from collections.abc import Sequence

from experiments.replay_error.figures import rows
from experiments.replay_error.readme_tables import Parts, Row, against_floors
from experiments.replay_error.tables import pairs


def held(so: bool, claim: str) -> None:
    """AssertionError where the results do not say what the page claims."""
    if not so:
        raise AssertionError(f"the results do not say that {claim}: write that finding anew")


def one(parts: Parts, part: str, policy: str, where: str = "summary", **equal: object) -> Row:
    (row,) = rows(parts, part, where, policy=policy, **equal)
    return row


def pair(parts: Parts, part: str, first: str, second: str) -> Row:
    found = (
        [*rows(parts, part, "pairs", first=first, second=second)]
        if part
        else [r for r in against_floors(parts) if (r["first"], r["second"]) == (first, second)]
    )
    (row,) = found
    return row


def of_keep(parts: Parts, first: str, second: str) -> Row:
    """Any two policies of the part keep, on the same tokens."""
    return pairs(parts["keep"].tables["passages"], [(first, second)])[0]


def below(row: Row, column: str, bound: float) -> bool:
    """Whether the whole interval lies below a number."""
    return row[f"{column}_high"] < bound


def above(row: Row, column: str, bound: float) -> bool:
    return row[f"{column}_low"] > bound


def listed(words: Sequence[str]) -> str:
    return f"{', '.join(words[:-1])} and {words[-1]}" if len(words) > 1 else words[0]
