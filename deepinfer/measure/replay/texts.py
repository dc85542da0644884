"""The texts of a measurement: token ids of one length, and the group that each belongs to."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from deepinfer.engine.engine import Engine, Prompts


def check_count(who: str, name: str, value: object, what: str = "a number of tokens") -> None:
    """ValueError, signed by `who`, for what is no whole number of 1 or more."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{who}: {name}={value!r}: {what}, 1 or more")


@dataclass(frozen=True)
class Texts:
    """ids: of each text, prompt + continuation of them; groups: one label a text: as given, or the
    module that a text of di.data says it is of, or else its number (grouped: none is a number)."""

    ids: tuple[tuple[int, ...], ...]
    groups: tuple[str, ...]
    prompt: int
    continuation: int
    grouped: bool = True

    @staticmethod
    def of(
        eng: Engine,
        texts: Prompts,
        prompt: int,
        continuation: int,
        groups: Sequence[Any] | None,
        who: str,
    ) -> Texts:
        """Raises ValueError naming the text that is bad or too short, and labels that don't fit;
        TypeError for what is no Engine."""
        from deepinfer.engine.engine import Engine
        from deepinfer.engine.text import encode_prompt, prompt_list

        if not isinstance(eng, Engine):
            raise TypeError(f"{who}: want an Engine, found {type(eng).__name__} {eng!r}")
        check_count(who, "prompt", prompt)
        check_count(who, "continuation", continuation)
        total, found = prompt + continuation, []
        items = prompt_list(texts)[0]  # once: it may be an iterator
        for i, text in enumerate(items):
            try:
                ids = encode_prompt(eng, text)
            except ValueError as error:
                raise ValueError(f"{who}: text {i}: {error}") from None
            if len(ids) < total:
                raise ValueError(
                    f"{who}: text {i} has {len(ids)} tokens; prompt={prompt} and continuation="
                    f"{continuation} take {total}: give a longer text or ask for less"
                )
            found.append(tuple(ids[:total]))
        if not found:
            raise ValueError(f"{who}: no texts: give at least one")
        own = [getattr(text, "module", i) for i, text in enumerate(items)]
        labels = own if groups is None else list(groups)
        if len(labels) != len(found):
            raise ValueError(
                f"{who}: {len(labels)} groups for {len(found)} texts: want one label each"
            )
        if total > eng.config.max_position_embeddings:
            raise ValueError(
                f"{who}: {total} tokens, the model has "
                f"{eng.config.max_position_embeddings} positions"
            )
        given = groups is not None or all(isinstance(label, str) for label in own)
        return Texts(tuple(found), tuple(map(str, labels)), prompt, continuation, given)

    def __len__(self) -> int:
        return len(self.ids)

    def fed(self, i: int) -> list[int]:
        """The ids of text i that are fed: all but the last, which nothing has to predict from."""
        return list(self.ids[i][:-1])

    def next(self, i: int) -> torch.Tensor:
        """[c] the tokens that really come after the prompt of text i."""
        return torch.tensor(self.ids[i][self.prompt :])

    def digest(self, i: int) -> str:
        """A hash of the ids of text i, by which it is known again in another report."""
        return hashlib.sha256(repr(self.ids[i]).encode()).hexdigest()[:16]

    def label(self, i: int) -> dict[str, object]:
        return dict(text=i, group=self.groups[i])

    @property
    def facts(self) -> dict[str, object]:
        """Provenance: sizes, and a hash of all ids."""
        digest = hashlib.sha256(repr(self.ids).encode()).hexdigest()[:16]
        return dict(
            texts=len(self),
            groups=len(set(self.groups)),
            prompt=self.prompt,
            grouped=self.grouped,
            continuation=self.continuation,
            ids=digest,
        )
