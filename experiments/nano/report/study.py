"""What every section of the report works on: two engines over the same weights, texts and sizes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from deepinfer.engine.engine import Engine
from deepinfer.engine.provenance import of_engine
from deepinfer.tables.table import Table
from experiments.nano.report.texts import Document, Logits, Scored, firsts, modules, score


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """How much is measured. `quick` is for trying the command, not for figures."""

    piece: int = 4096  # tokens of a cold piece: the model's training length
    part: int = 2048  # first tokens of every file, for what is repeated many times
    older: int = 2048  # pieces of the older figures
    contexts: int = 64  # continued texts
    prompt: int = 1024  # their prompt tokens, at most
    written: int = 192  # tokens written for each
    apart: int = 8  # tokens between draft blocks on real text
    paths: int = 1024  # first tokens of every file on each evaluation path
    paths_slow: int = 8  # files that the slow paths run on, all others too
    bins: int = 15  # of confidence, equal width
    rows: int = 512  # tokens of a prefill step: on a CPU faster than one long step
    seqs: int = 16

    def quick(self) -> Sizes:
        return replace(
            self,
            piece=256,
            part=96,
            older=128,
            contexts=12,
            prompt=96,
            written=24,
            apart=16,
            paths=64,
            paths_slow=2,
            rows=128,
        )


@dataclass(frozen=True)
class Study:
    """stored: the checkpoint as it ships; unquantised: its control, or None (a second seed)."""

    stored: Engine
    unquantised: Engine | None
    heldout: Sequence[Document]
    prose: Sequence[Document]
    dev: Sequence[Document]
    sizes: Sizes
    jobs: int = 1

    @property
    def bos(self) -> int:
        return self.stored.config.bos_token_id

    @cached_property
    def part(self) -> list[Document]:
        """The first tokens of every held-out file."""
        return firsts(self.stored.tokenizer, self.heldout, self.sizes.part)

    @cached_property
    def part_scored(self) -> list[Scored]:
        """`part` under the stored model: the control of what is measured there."""
        return self.score(self.stored.logits, self.part, self.sizes.part)

    def score(self, logits: Logits, docs: Sequence[Document], size: int) -> list[Scored]:
        """Every token of the documents once, in cold pieces of at most `size` tokens."""
        return score(logits, self.bos, docs, size, self.jobs)

    @property
    def said(self) -> str:
        """What the held-out texts are, in words."""
        docs, size = self.heldout, sum(d.nbytes for d in self.heldout)
        return f"{len(docs)} files of {len(modules(docs))} modules, {size:,} bytes"

    def table(self, rows: Any, title: str = "", columns: Any = None, **facts: object) -> Table:
        """A Table that carries what it was measured on."""
        known = of_engine(self.stored)
        if self.unquantised is not None:
            known["unquantised_weights"] = self.unquantised.fingerprint
        known["sizes"] = vars(self.sizes)
        return Table(rows, columns, title=title, provenance={**known, **facts})


def load(path: str, sizes: Sizes, device: str = "cpu", dtype: str = "float32") -> Engine:
    """A checkpoint folder in float32 at fidelity 1, with room for the study's texts."""
    return Engine.from_pretrained(
        path,
        device=device,
        dtype=dtype,
        fidelity=1,
        max_model_len=max(sizes.piece, 64),
        max_num_seqs=sizes.seqs,
        max_num_batched_tokens=sizes.rows,
    )
