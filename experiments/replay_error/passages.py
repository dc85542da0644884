"""Texts as ids: passages of one length, and the module that each comes from."""

from __future__ import annotations

from dataclasses import dataclass

from deepinfer import data
from deepinfer.engine.engine import Engine

SETS = {"heldout": data.heldout, "prose": data.prose}


@dataclass(frozen=True)
class Passages:
    """ids: of each passage, bos first; modules: where each comes from."""

    ids: list[list[int]]
    modules: list[str]

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, at: slice) -> Passages:
        return Passages(self.ids[at], self.modules[at])


def passages(eng: Engine, of: str, tokens: int, count: int) -> Passages:
    """`count` passages of exactly `tokens` ids that do not overlap: first one of each module, from the
    beginning of its largest file, then a second of each, ... ValueError where there are fewer."""
    body, queues = tokens - 1, {}
    for text in sorted(SETS[of](None), key=len, reverse=True):
        ids = eng.encode(text, bos=False)
        parts = [ids[i : i + body] for i in range(0, len(ids) - body + 1, body)]
        queues.setdefault(text.module, []).extend(parts)
    most = max((len(q) for q in queues.values()), default=0)
    found = [
        (q[turn], m) for turn in range(most) for m, q in sorted(queues.items()) if turn < len(q)
    ]
    if len(found) < count:
        raise ValueError(f"{count} passages of {tokens} tokens of {of}: there are {len(found)}")
    bos = eng.config.bos_token_id
    return Passages([[bos, *ids] for ids, _ in found[:count]], [m for _, m in found[:count]])


def last(of: Passages, tokens: int, eng: Engine) -> Passages:
    """The last `tokens` ids of each passage behind a bos: the same continuation, less before it."""
    bos = eng.config.bos_token_id
    return Passages([[bos, *ids[1 - tokens :]] for ids in of.ids], of.modules)
