"""Report: the laws run on an object, which hold, and the smallest case of each that fails."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from deepinfer.tables.table import Table

OK, FAILED, NOT_RUN = "ok", "FAILED", "not run"


class ConformanceError(AssertionError):
    """Raised by Report.raise_for_failures; its text is the report."""


@dataclass(frozen=True)
class Result:
    """One law. case: the smallest failing case, or why it was not run; empty where it holds."""

    law: str
    status: str
    case: str = ""


@dataclass(frozen=True, repr=False)
class Report:
    """What `di.check` found. Truthy iff every law that was run holds."""

    subject: str
    slot: str
    results: tuple[Result, ...]

    def __bool__(self) -> bool:
        return not self.failures

    @property
    def failures(self) -> tuple[Result, ...]:
        return tuple(r for r in self.results if r.status == FAILED)

    def raise_for_failures(self) -> Report:
        """Raise ConformanceError where a law is broken; return self."""
        if self.failures:
            raise ConformanceError(repr(self))
        return self

    def table(self) -> Table:
        """One row a law: law, status, case."""
        from deepinfer.tables.table import Table

        return Table([dict(law=r.law, status=r.status, case=r.case) for r in self.results])

    def _repr_html_(self) -> str:
        from deepinfer.display.report import report_html

        return report_html(self)

    def __repr__(self) -> str:
        ran = [r for r in self.results if r.status != NOT_RUN]
        broken = len(self.failures)
        laws = "law" if len(ran) == 1 else "laws"
        if broken:
            verdict = f"{broken} of {len(ran)} {laws} broken"
        else:
            verdict = f"all {len(ran)} laws hold" if len(ran) > 1 else "1 law holds"
        lines = [f"{self.subject} as {self.slot}: {verdict}"]
        for r in self.results:
            lines.append(f"  {r.status:8}{r.law}")
            if r.case:
                lines += textwrap.wrap(
                    r.case, 98, initial_indent=" " * 10, subsequent_indent=" " * 12
                )
        return "\n".join(lines)
