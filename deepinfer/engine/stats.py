"""What an engine counts. No clock: the same run gives the same counters everywhere."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass
class Stats:
    """Counters since the engine was made. drafted / accepted: by draft depth, 0 first."""

    steps: int = 0
    prefill_steps: int = 0
    decode_steps: int = 0
    mixed_steps: int = 0
    prefill_rows: int = 0
    decode_rows: int = 0
    tokens: int = 0
    preemptions: int = 0
    finished: Counter = field(default_factory=Counter)
    drafted: Counter = field(default_factory=Counter)
    accepted: Counter = field(default_factory=Counter)

    def count(self, kind: str, rows: list[tuple[bool, int]]) -> None:
        """A step of this kind; rows: for each sequence whether it decodes, and its rows."""
        self.steps += 1
        self.prefill_steps += kind == "prefill"
        self.decode_steps += kind == "decode"
        self.mixed_steps += kind == "mixed"
        self.decode_rows += sum(n for decode, n in rows if decode)
        self.prefill_rows += sum(n for decode, n in rows if not decode)

    @property
    def acceptance(self) -> float | None:
        """Accepted share of the verified drafts, None before the first."""
        total = sum(self.drafted.values())
        return sum(self.accepted.values()) / total if total else None

    @property
    def tokens_per_step(self) -> float | None:
        """Output tokens per decode row of an anchor (bonus included), None before the first."""
        anchors = self.decode_rows - sum(self.drafted.values())
        return (anchors + sum(self.accepted.values())) / anchors if anchors else None

    def table(self):
        """name, value rows; drafts by depth."""
        from deepinfer.measure.table import Table

        rows = [
            dict(name=n, value=getattr(self, n))
            for n in (
                "steps", "prefill_steps", "decode_steps", "prefill_rows", "decode_rows", "tokens",
                "acceptance", "tokens_per_step",
            )
        ]
        rows += [
            dict(name=n, value=getattr(self, n))
            for n in ("mixed_steps", "preemptions") if getattr(self, n)
        ]
        rows += [dict(name=f"finished {k}", value=v) for k, v in sorted(self.finished.items())]
        for depth in sorted(self.drafted):
            rows.append(dict(name=f"draft {depth + 1} verified", value=self.drafted[depth]))
            rows.append(dict(name=f"draft {depth + 1} accepted", value=self.accepted[depth]))
        return Table(rows)

    def __repr__(self) -> str:
        return repr(self.table())

    def _repr_html_(self) -> str:
        return self.table()._repr_html_()
