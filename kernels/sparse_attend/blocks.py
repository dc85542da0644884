"""Sparse attention on the CPU: blocks of rows over the distinct keys they list.

Rows of a prefill list overlapping windows. Reading the keys of a block of rows once and masking
the ones a row does not list makes two plain matrix products of it. Where rows list different keys
(decode of many sequences, selected entries of a long context) keys are gathered per row instead.
"""

from __future__ import annotations

import numpy as np
import torch

from ..numerics import acc_dtype, unless_plain_cpu
from ..records import Records

ROWS = 64  # of a block
SPREAD = 4  # distinct keys per listed key of a row up to which masking beats gathering


def supports(q, window, window_ids, entries, entry_ids, sink, scale) -> str | None:
    return unless_plain_cpu(
        q, window.own, window.stored, None if entries is None else entries.own, sink
    )


def sparse_attend(q, window, window_ids, entries, entry_ids, sink, scale):
    """As the reference, without a gradient."""
    wide = acc_dtype(q)
    scaled = q.to(wide) * scale
    sources = [(window, window_ids)]
    if entries is not None and entry_ids.shape[1]:
        sources.append((entries, entry_ids))
    sink = sink.to(wide)
    if len(q) <= ROWS:
        return _block(scaled, sources, sink).to(q.dtype)
    parts = []
    for i in range(0, len(q), ROWS):
        rows = slice(i, i + ROWS)
        parts.append(_block(scaled[rows], [(r, ids[rows]) for r, ids in sources], sink))
    return torch.cat(parts).to(q.dtype)


def _block(q: torch.Tensor, sources: list, sink: torch.Tensor) -> torch.Tensor:
    """Attention of a block of rows, q "t h d" already scaled."""
    t, h, d = q.shape
    logits, keys, widths = [], [], []
    for records, ids in sources:
        part, rows = _masked(q, records, ids) or _gathered(q, records, ids)
        logits.append(part)
        keys.append(rows)
        widths.append(part.shape[2])
    logits.append(sink.view(1, h, 1).expand(t, h, 1))
    share = torch.softmax(torch.cat(logits, dim=2), dim=2).split([*widths, 1], dim=2)
    out = torch.zeros(t, h, d, dtype=q.dtype)
    for part, rows in zip(share, keys):
        if rows.ndim == 2:
            out.view(t * h, d).addmm_(part.reshape(t * h, -1), rows)
        else:
            out.baddbmm_(part, rows)
    return out


def _masked(q: torch.Tensor, records: Records, ids: torch.Tensor):
    """Logits "t h u" of the u distinct keys of the block and the keys "u d"; None where there are
    too many, or where a key is not finite (its share of zero would still spread it)."""
    t, h, d = q.shape
    if t == 1:
        return None
    listed = ids.numpy()
    total = records.count + (0 if records.own is None else len(records.own))
    seen = np.zeros(total + 1, bool)
    seen[listed] = True  # -1 is the last one
    seen[-1] = False
    distinct = np.flatnonzero(seen)
    u = len(distinct)
    if u == 0 or u > SPREAD * listed.shape[1]:
        return None
    rows = records.gather(torch.from_numpy(distinct), q.dtype)
    if not torch.isfinite(rows).all():
        return None
    place = np.empty(total + 1, np.int64)
    place[distinct] = np.arange(u)
    place[-1] = u
    flat = place[listed] + np.arange(t)[:, None] * (u + 1)
    # A key listed twice counts twice: the logarithm of how often is added to its logit.
    times = np.bincount(flat.ravel(), minlength=t * (u + 1)).reshape(t, u + 1)[:, :u]
    bias = torch.from_numpy(times).to(q.dtype).log_()
    logits = torch.mm(q.reshape(t * h, d), rows.T).view(t, h, u)
    return logits.add_(bias.unsqueeze(1)), rows


def _gathered(q: torch.Tensor, records: Records, ids: torch.Tensor):
    """Logits "t h k" of the listed keys and the keys "t k d"."""
    rows = _gather(records, ids, q.dtype)
    logits = torch.bmm(q, rows.mT)
    return logits.masked_fill_((ids < 0).unsqueeze(1), -torch.inf), rows


def _gather(records: Records, ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`records.gather` with one pass over a float history and a second only over own rows."""
    stored, own = records.stored, records.own
    if stored is None or records.layout.packed or stored.dtype != dtype:
        return records.gather(ids, dtype)
    listed = ids.numpy()
    rows = np.take(stored.numpy(), listed, axis=0, mode="clip")  # -1 reads record 0: zeros
    mine = listed >= records.count
    if own is not None and mine.any():
        rows[mine] = own.to(dtype).numpy()[listed[mine] - records.count]
    return torch.from_numpy(rows)
