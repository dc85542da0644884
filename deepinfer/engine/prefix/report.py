"""CacheReport: the prefix cache in numbers, `eng.cache`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from deepinfer.tables.table import Table


@dataclass(frozen=True)
class CacheReport:
    """hits: how often a request began behind cached pages; one that was preempted begins again and
    counts again. hit_tokens: tokens that those requests did not compute. lost_tokens: tokens that
    were found in pages and computed all the same, because no snapshot was there; if there are many,
    raise num_snapshots. pages, snapshots: those that are known, in use or not. evictions: those
    that had to make room. `eng.clear_cache()` forgets what is cached and goes on counting."""

    hits: int = 0
    hit_tokens: int = 0
    lost_tokens: int = 0
    pages: int = 0
    page_evictions: int = 0
    snapshots: int = 0
    snapshot_bytes: int = 0
    snapshot_evictions: int = 0
    facts: Callable[[], dict[str, object]] = field(default=dict, compare=False)  # of the engine

    def table(self) -> Table:
        """name, value rows."""
        from deepinfer.tables.table import Table

        counts = [f.name for f in dataclasses.fields(self) if f.name != "facts"]
        rows = [dict(name=n, value=getattr(self, n)) for n in counts]
        return Table(rows, title="prefix cache", provenance=self.facts())

    def __repr__(self) -> str:
        return repr(self.table())

    def _repr_html_(self) -> str:
        return self.table()._repr_html_()
