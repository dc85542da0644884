"""Triton kernels of the expansion over four streams: every input is read once, every result
written once. The four streams of a tile and their weights stay in registers.

A name that ends in s (streams, columns) is a tuple of four: tiles "rows d" or weights "rows".
"""

import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]


@triton.jit
def _weights(pointer, STEP: tl.constexpr, live):
    """Four numbers per row, STEP apart."""
    return (
        tl.load(pointer, mask=live, other=0.0),
        tl.load(pointer + STEP, mask=live, other=0.0),
        tl.load(pointer + 2 * STEP, mask=live, other=0.0),
        tl.load(pointer + 3 * STEP, mask=live, other=0.0),
    )


@triton.jit
def _tiles(pointer, D: tl.constexpr, mask):
    """The same channels of four streams, in float32."""
    return (
        tl.load(pointer, mask=mask, other=0.0).to(tl.float32),
        tl.load(pointer + D, mask=mask, other=0.0).to(tl.float32),
        tl.load(pointer + 2 * D, mask=mask, other=0.0).to(tl.float32),
        tl.load(pointer + 3 * D, mask=mask, other=0.0).to(tl.float32),
    )


@triton.jit
def _mixed(weights, tiles):
    """sum_i weights_i tiles_i."""
    total = weights[0][:, None] * tiles[0]
    total += weights[1][:, None] * tiles[1]
    total += weights[2][:, None] * tiles[2]
    total += weights[3][:, None] * tiles[3]
    return total


@triton.jit
def _plus_products(totals, tile, tiles):
    """totals_i + sum_d tile tiles_i."""
    return (
        totals[0] + tl.sum(tile * tiles[0], axis=1),
        totals[1] + tl.sum(tile * tiles[1], axis=1),
        totals[2] + tl.sum(tile * tiles[2], axis=1),
        totals[3] + tl.sum(tile * tiles[3], axis=1),
    )


@triton.jit
def _stacked(parts):
    """Four tensors as one with a new last axis, so that one store writes them together."""
    pairs = tl.join(tl.join(parts[0], parts[2]), tl.join(parts[1], parts[3]))
    return tl.reshape(pairs, parts[0].shape + (4,))


@triton.jit(do_not_specialize=["t"])
def forward(
    streams, y, post, comb, out, t, D: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    """out[t, k, d] = post[t, k] y[t, d] + sum_j comb[t, j, k] streams[t, j, d]."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live = row < t
    posts = _weights(post + row * 4, 1, live)
    column0 = _weights(comb + row * 16, 4, live)
    column1 = _weights(comb + row * 16 + 1, 4, live)
    column2 = _weights(comb + row * 16 + 2, 4, live)
    column3 = _weights(comb + row * 16 + 3, 4, live)
    for start in range(0, D, BLOCK):
        col = start + tl.arange(0, BLOCK)
        mask = live[:, None] & (col < D)[None, :]
        at = (row * (4 * D))[:, None] + col[None, :]
        tiles = _tiles(streams + at, D, mask)
        add = tl.load(y + (row * D)[:, None] + col[None, :], mask=mask, other=0.0).to(tl.float32)
        tl.store(out + at, posts[0][:, None] * add + _mixed(column0, tiles), mask=mask)
        tl.store(out + at + D, posts[1][:, None] * add + _mixed(column1, tiles), mask=mask)
        tl.store(out + at + 2 * D, posts[2][:, None] * add + _mixed(column2, tiles), mask=mask)
        tl.store(out + at + 3 * D, posts[3][:, None] * add + _mixed(column3, tiles), mask=mask)


@triton.jit(do_not_specialize=["t"])
def backward(
    grad,
    streams,
    y,
    post,
    comb,
    d_streams,
    d_y,
    d_post,
    d_comb,
    t,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """From grad g: d_streams_j = sum_k comb[j, k] g_k, d_y = sum_k post_k g_k,
    d_post_k = y g_k and d_comb[j, k] = streams_j g_k, both summed over channels."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live = row < t
    posts = _weights(post + row * 4, 1, live)
    row0 = _weights(comb + row * 16, 1, live)
    row1 = _weights(comb + row * 16 + 4, 1, live)
    row2 = _weights(comb + row * 16 + 8, 1, live)
    row3 = _weights(comb + row * 16 + 12, 1, live)
    zero = tl.zeros((ROWS,), tl.float32)
    of_post = (zero, zero, zero, zero)  # one sum over channels for each stream k of the gradient
    column0 = (zero, zero, zero, zero)  # of d_comb[:, 0]
    column1 = (zero, zero, zero, zero)
    column2 = (zero, zero, zero, zero)
    column3 = (zero, zero, zero, zero)
    for start in range(0, D, BLOCK):
        col = start + tl.arange(0, BLOCK)
        mask = live[:, None] & (col < D)[None, :]
        at = (row * (4 * D))[:, None] + col[None, :]
        y_at = (row * D)[:, None] + col[None, :]
        grads = _tiles(grad + at, D, mask)
        tiles = _tiles(streams + at, D, mask)
        added = tl.load(y + y_at, mask=mask, other=0.0).to(tl.float32)
        tl.store(d_y + y_at, _mixed(posts, grads), mask=mask)
        tl.store(d_streams + at, _mixed(row0, grads), mask=mask)
        tl.store(d_streams + at + D, _mixed(row1, grads), mask=mask)
        tl.store(d_streams + at + 2 * D, _mixed(row2, grads), mask=mask)
        tl.store(d_streams + at + 3 * D, _mixed(row3, grads), mask=mask)
        of_post = _plus_products(of_post, added, grads)
        column0 = _plus_products(column0, grads[0], tiles)
        column1 = _plus_products(column1, grads[1], tiles)
        column2 = _plus_products(column2, grads[2], tiles)
        column3 = _plus_products(column3, grads[3], tiles)
    four = tl.arange(0, 4)
    tl.store(d_post + (row * 4)[:, None] + four[None, :], _stacked(of_post), mask=live[:, None])
    matrix = _stacked((_stacked(column0), _stacked(column1), _stacked(column2), _stacked(column3)))
    entry = four[:, None] * 4 + four[None, :]
    at = (row * 16)[:, None, None] + entry[None, :, :]
    tl.store(d_comb + at, matrix, mask=live[:, None, None])
