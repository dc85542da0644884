"""Page keys: digests of everything that decided what is in a page.

The chain of pages before it, the ids of its tokens, the images that reach into it, and at the root
of the chain the weights, the salt and the adapter. Keys are full SHA-256 digests over typed and
length-prefixed parts, the same in every process: no two contents share a key, and keys may leave
the process.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


DIGEST_BYTES = 32  # of SHA-256, never shortened


def digest(*parts: tuple[str, bytes | None]) -> bytes:
    """SHA-256 over named parts. Name and value are length-prefixed and a missing value (None) is
    not an empty one, so different lists of parts never give the same bytes."""
    h = hashlib.sha256()
    for name, value in parts:
        label = name.encode()
        size = -1 if value is None else len(value)
        h.update(struct.pack("<qq", len(label), size) + label + (value or b""))
    return h.digest()


def image_digest(pixels: Tensor) -> bytes:
    """What identifies a picture: dtype, shape and every byte of it."""
    import torch

    data = pixels.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    shape = integers(pixels.shape)
    return digest(("dtype", str(pixels.dtype).encode()), ("shape", shape), ("pixels", data))


def integers(values: Sequence[int]) -> bytes:
    """8 bytes each, so that [1, 23] is not [12, 3]."""
    try:
        return struct.pack(f"<{len(values)}q", *values)
    except struct.error as error:
        wrong = next((v for v in values if not hasattr(v, "__index__")), values)
        raise TypeError(f"token ids are 64-bit integers, found {wrong!r}") from error


@dataclass(frozen=True, slots=True)
class ImageSpan:
    """Positions start..stop-1 hold rows of the picture with this digest (see `image_digest`)."""

    start: int
    stop: int
    digest: bytes

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.stop:
            raise ValueError(
                f"an image at positions {self.start}..{self.stop - 1}: want 0 <= start < stop"
            )
        if len(self.digest) != DIGEST_BYTES:
            raise ValueError(
                f"an image digest of {len(self.digest)} bytes: pass all {DIGEST_BYTES} "
                "of image_digest(pixels)"
            )


def text(value: str | None) -> bytes | None:
    return None if value is None else value.encode()


def root_key(
    model: str = "", salt: str | None = None, adapter: str | None = None, generation: int = 0
) -> bytes:
    """Parent of a first page. model: what all sequences of an engine share (weights, dtype,
    fidelity); salt: whoever uses another one shares nothing; adapter: the weights added for this
    request; generation: how often all that was cached was forgotten before."""
    parts = [("model", text(model)), ("salt", text(salt)), ("adapter", text(adapter))]
    return digest(*parts, *([("generation", integers([generation]))] if generation else []))


def page_key(
    parent: bytes, start: int, ids: Sequence[int], images: Sequence[ImageSpan] = ()
) -> bytes:
    """Key of the page with token `ids` from position `start` on, behind the page `parent`."""
    stop = start + len(ids)
    parts = [("parent", parent), ("ids", integers(ids))]
    for image in sorted(images, key=lambda i: (i.start, i.stop, i.digest)):
        if image.start < stop and image.stop > start:
            # Which rows of the picture these are follows from where it starts, seen from here.
            place = integers([image.start - start, image.stop - start])
            parts += [("image place", place), ("image", image.digest)]
    return digest(*parts)
