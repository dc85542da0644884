"""mHC: manifold-constrained hyper-connections, single pass.

Each of the two sites of a layer (attention, FFN) mixes m residual streams S [t, m, d]:
    z = (fn flatten(S)) * rsqrt(mean(flatten(S)^2) + eps)
    pre  = sigmoid(z_pre * scale_0 + base) + hc_eps          weights of the NEXT site's input
    post = 2 sigmoid(z_post * scale_1 + base)                where this site's output goes
    comb = Sinkhorn(softmax(z_comb * scale_2 + base))        how streams mix (row j -> column k)
    input = sum_m pre_m S_m;   S'_k = post_k y + sum_j comb[j, k] S_j
The shift: a site's input uses the `pre` of the site before it (first site: stream 0 alone; the
head:
the last FFN's). The checkpoint's fn already holds the norm weight.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from deepinfer.config import ModelConfig
from deepinfer.model.layers import frozen


def declare(module: nn.Module, config: ModelConfig, site: str) -> None:
    """Create hc_<site>_fn/base/scale on a layer, kept in FP32 (FP64 in an FP64 model) at any
    dtype."""
    m, d = config.hc_mult, config.hidden_size
    setattr(module, f"hc_{site}_fn", frozen((2 + m) * m, m * d, dtype=torch.float32))
    setattr(module, f"hc_{site}_base", frozen((2 + m) * m, dtype=torch.float32))
    setattr(module, f"hc_{site}_scale", frozen(3, dtype=torch.float32))


def mix(module: nn.Module, site: str, streams: Tensor, ctx) -> tuple[Tensor, Tensor, Tensor]:
    """(pre [t, m], post [t, m], comb [t, m, m]) of a site."""
    c = ctx.config
    return ctx.ops.mhc_mix(
        streams,
        getattr(module, f"hc_{site}_fn"),
        getattr(module, f"hc_{site}_base"),
        getattr(module, f"hc_{site}_scale"),
        iters=c.hc_sinkhorn_iters,
        norm_eps=c.rms_norm_eps,
        hc_eps=c.hc_eps,
    )


def first_pre(rows: int, streams: int, like: Tensor) -> Tensor:
    """[t, m] one-hot on stream 0: what the first site of a stack reads."""
    pre = torch.zeros(
        rows, streams, dtype=torch.promote_types(like.dtype, torch.float32), device=like.device
    )
    pre[:, 0] = 1
    return pre
