"""Expert selection, bits independent of other rows: products in tiles, the rest in blocks."""

from __future__ import annotations

from ..numerics import acc_dtype, in_row_blocks, tiled_linear
from ..route.reference import from_logits


def route(x, weight, bias, bias_image, image, top_k, scale):
    """As the reference."""
    wide = acc_dtype(x)
    logits = tiled_linear(x.to(wide), weight.to(wide))

    def rest(logits, image):
        return from_logits(logits, bias, bias_image, image, top_k, scale)

    return in_row_blocks(rest, logits, image, width=logits.shape[1])
