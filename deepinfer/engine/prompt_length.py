"""How long a prompt may be, said before it is read: a prompt that is far too long costs milliseconds."""

from __future__ import annotations

from collections.abc import Callable, Sized
from typing import Any

CHARACTERS = 8  # of a token, more than most texts have: how much text is tokenised at first
MARGIN = 256  # tokens by which a piece of a text may have more than the same place in the whole


def require_length(prompt: Any, limit: int, encode: Callable[[str], list[int]]) -> None:
    """Raise ValueError if a prompt has more tokens than an engine takes, without reading all of it.
    limit: the engine's max_model_len; encode: token ids of a text.

    Ids are counted. Of a text, pieces from its beginning are tokenised, each twice as long as the
    one before, until one has too many tokens. A prompt that passes may still be a little too long:
    `Loop.add` counts its tokens.
    """
    if not isinstance(prompt, str):
        if isinstance(prompt, Sized) and getattr(prompt, "ndim", 1) and len(prompt) > limit:
            raise too_long(str(len(prompt)), limit)
        return
    length = CHARACTERS * limit
    while length < len(prompt):
        count = len(encode(prompt[:length]))
        if count > limit + MARGIN:
            raise too_long(f"more than {count}", limit, f"{length:,} of {len(prompt):,} characters")
        length *= 2


def too_long(tokens: str, limit: int, counted: str = "") -> ValueError:
    """The error for a prompt with this many tokens. limit: tokens of prompt and output together."""
    where = f" ({counted} were counted)" if counted else ""
    return ValueError(
        f"the prompt has {tokens} tokens{where}, this engine takes at most {limit - 1} "
        f"(max_model_len={limit} with room for one): shorten it or raise max_model_len"
    )
