"""NoGrammar: every token is legal. It also shows the shape of a grammar variant."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from deepinfer.slots.registry import registry
from deepinfer.slots.settings import shown

if TYPE_CHECKING:
    from torch import Tensor


class FreeState:
    """A state in which every token is legal and nothing is ever finished."""

    done = False

    def allowed(self) -> Tensor | None:
        return None

    def accept(self, token: int) -> bool:
        return True

    def rollback(self, n: int) -> None:
        pass

    def fork(self) -> FreeState:
        return self  # it holds nothing that could come to differ


class Free:
    """What `NoGrammar.compile` returns: `start()` gives the state of one request."""

    def start(self) -> FreeState:
        return FreeState()


@registry("grammar").register("none")
class NoGrammar:
    """Every token is legal at every position. A request that brings a grammar is refused."""

    exact = True
    batch_invariant = True
    on_device = True

    def __repr__(self) -> str:
        return shown(self)

    def compile(self, spec: Any, vocab: Any) -> Free:
        if spec is not None:
            raise ValueError(
                f"grammar={spec!r}: this engine's grammar slot is 'none', which constrains "
                "nothing; make an engine with another grammar variant, eng.with_(grammar=...)"
            )
        return Free()
