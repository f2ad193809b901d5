# SPDX-License-Identifier: Apache-2.0
"""S_dmask of flash-attn: softmax probabilities, negative where dropout removed them. O(N²) memory, for tests."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fa2_cpu import philox_keep_mask


def signed(
    q, k, lse, *, layout, scale, causal, window, softcap, alibi_slopes, dropout_p, philox,
    cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=0, max_seqlen_k=0,
) -> Tensor:  # fmt: skip
    """[B, Hq, Nq, Nk] in q's dtype, B the number of sequences and Nq, Nk the longest for layout "thd"."""
    seed, offset = philox.tolist()
    heads = q.shape[-2]
    if layout == "thd":
        starts_q, starts_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
        shape = (len(starts_q) - 1, heads, max_seqlen_q, max_seqlen_k)
        sequences = [
            (q[a:b], k[c:d], lse[:, a:b])
            for a, b, c, d in zip(starts_q, starts_q[1:], starts_k, starts_k[1:])
        ]  # fmt: skip
    else:
        shape = (q.shape[0], heads, q.shape[1], k.shape[1])
        sequences = list(zip(q, k, lse))
    keep = torch.from_numpy(philox_keep_mask(shape, dropout_p, seed, offset))
    result = q.new_zeros(shape)
    scale = 1.0 / math.sqrt(q.shape[-1]) if scale is None else scale
    with torch.no_grad():
        for b, (qb, kb, lse_b) in enumerate(sequences):
            slopes = None
            if alibi_slopes is not None:
                slopes = alibi_slopes if alibi_slopes.dim() == 1 else alibi_slopes[b]
            p = _probabilities(qb, kb, lse_b, scale, causal, window, softcap, slopes)
            n, m = p.shape[-2:]
            result[b, :, :n, :m] = torch.where(keep[b, :, :n, :m], p, -p)
    return result


def _probabilities(q, k, lse, scale, causal, window, softcap, slopes) -> Tensor:
    """exp(S − lse) [H, Nq, Nk] of one sequence: q [Nq, H, D], k [Nk, Hkv, D], lse [H, Nq]."""
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    scores = scale * torch.einsum("qhd,khd->hqk", q.double(), k.double())
    if softcap > 0.0:
        scores = softcap * torch.tanh(scores / softcap)
    distance = torch.arange(k.shape[0])[None] - torch.arange(q.shape[0])[:, None] - (k.shape[0] - q.shape[0])
    if slopes is not None:
        scores = scores - slopes.double()[:, None, None] * distance.abs()
    left, right = window
    hidden = torch.zeros_like(distance, dtype=torch.bool)
    if causal is not None:
        hidden |= distance > 0
    if left >= 0:
        hidden |= distance < -left
    if right >= 0:
        hidden |= distance > right
    return torch.exp(scores - lse.double()[..., None]).masked_fill(hidden, 0.0)
