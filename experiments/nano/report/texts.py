"""Held-out texts as what is scored: documents of token ids, each of a module, and pieces of them.

A module is the unit of every interval: files of one module depend on one another, modules hardly.
"""

from __future__ import annotations

import lzma
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from deepinfer.engine.text import byte_count
from experiments.nano.report.parallel import each

Logits = Callable[[list[int]], Tensor]  # ids of one cold sequence, bos first -> [t, v]


@dataclass(frozen=True)
class Document:
    """One file. ids: its tokens without bos and eos; data: the bytes that they spell."""

    module: str
    ids: tuple[int, ...]
    data: bytes

    @property
    def nbytes(self) -> int:
        return len(self.data)


def documents(tokenizer: Any, texts: Sequence[str], module: str = "") -> list[Document]:
    """The texts as documents. A text's `.module` names its module, else `module` and its number do.

    Raises ValueError where the tokens do not spell the text's bytes, for bits per byte would then
    be of another text.
    """
    found = []
    for i, text in enumerate(texts):
        ids = tokenizer.encode(str(text), add_special_tokens=False).ids
        data, spelt = text.encode(), byte_count(tokenizer, ids)
        if len(data) != spelt:
            raise ValueError(
                f"text {i} has {len(data)} bytes, its {len(ids)} tokens spell {spelt}: bits per "
                "byte need a tokenizer that loses nothing (byte-level, no normaliser)"
            )
        found.append(Document(getattr(text, "module", f"{module}{i}"), tuple(ids), data))
    return found


def firsts(tokenizer: Any, docs: Sequence[Document], tokens: int) -> list[Document]:
    """The first `tokens` tokens of every document, with the bytes that these spell."""
    cut = []
    for doc in docs:
        ids = doc.ids[:tokens]
        cut.append(replace(doc, ids=ids, data=doc.data[: byte_count(tokenizer, list(ids))]))
    return cut


def modules(docs: Sequence[Document]) -> list[str]:
    """Their modules, sorted."""
    return sorted({doc.module for doc in docs})


# ------------------------------------------------------------------------------------- scoring


@dataclass(frozen=True)
class Scored:
    """A document's tokens under a model. nats, position: [t] of each token, its place in its piece
    (0: predicted from bos alone); length: [t] tokens of its piece."""

    module: str
    nbytes: int
    nats: Tensor
    position: Tensor
    length: Tensor


def pieces(count: int, size: int) -> Iterator[tuple[int, int]]:
    """(first, stop) of the pieces of `count` tokens: together every token exactly once."""
    for first in range(0, count, size):
        yield first, min(first + size, count)


def token_nats(logits: Logits, bos: int, ids: Sequence[int]) -> Tensor:
    """[t] nats of each of `ids`, FP64, read cold: bos is all that comes before them."""
    rows = logits([bos, *ids[:-1]])
    target = torch.tensor(ids, device=rows.device)
    wide = rows.to(torch.promote_types(rows.dtype, torch.float32))
    return functional.cross_entropy(wide, target, reduction="none").double().cpu()


def score_one(logits: Logits, bos: int, doc: Document, size: int) -> Scored:
    """Every token of the document exactly once, in cold pieces of at most `size` tokens."""
    cuts = list(pieces(len(doc.ids), size))
    nats = [token_nats(logits, bos, doc.ids[a:b]) for a, b in cuts]
    place = [torch.arange(b - a) for a, b in cuts]
    length = [torch.full((b - a,), b - a) for a, b in cuts]
    none = torch.zeros(0)
    return Scored(
        doc.module,
        doc.nbytes,
        torch.cat([none.double(), *nats]),
        torch.cat([none.long(), *place]),
        torch.cat([none.long(), *length]),
    )


def score(
    logits: Logits, bos: int, docs: Sequence[Document], size: int, jobs: int = 1
) -> list[Scored]:
    """`score_one` of every document."""
    return each(lambda doc: score_one(logits, bos, doc, size), docs, jobs)


def totals(scored: Sequence[Scored]) -> dict[str, tuple[float, int]]:
    """module -> (nats, bytes) of all its documents."""
    found: dict[str, tuple[float, int]] = {}
    for s in scored:
        nats, size = found.get(s.module, (0.0, 0))
        found[s.module] = (nats + float(s.nats.sum()), size + s.nbytes)
    return found


def xz_bytes(data: bytes) -> int:
    """Bytes of `xz -9`: LZMA2, CRC64, the container's own bytes included."""
    return len(lzma.compress(data, preset=9))


def xz_shares(docs: Sequence[Document]) -> dict[str, float]:
    """The bytes of xz on all documents together, dealt out to their modules in proportion to what
    each needs alone: they add up to it, and a resampling of modules has a size to compare with."""
    whole = xz_bytes(b"".join(doc.data for doc in docs))
    alone = {
        module: xz_bytes(b"".join(doc.data for doc in docs if doc.module == module))
        for module in modules(docs)
    }
    scale = whole / sum(alone.values())
    return {module: size * scale for module, size in alone.items()}
