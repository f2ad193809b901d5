# SPDX-License-Identifier: Apache-2.0
"""Masks and score_mods as users of FlexAttention write them, and the answer in float64."""

import math

import torch
from torch.nn.attention.flex_attention import and_masks, or_masks

from fa2_cpu.torch._flex._index_functions import ReadByTensor

LENGTH = 200
WIDTH = 10  # of a picture of two dimensions
torch.manual_seed(7)
DOCUMENTS = torch.tensor([3, 50, 21, 126]).repeat_interleave(torch.tensor([30, 70, 11, 89]))
PREFIX = torch.tensor([17, 90])
MODALITY = ((20, 60), (110, 170))
TREE = torch.tril(torch.rand(LENGTH, LENGTH) > 0.9) | torch.eye(LENGTH, dtype=torch.bool)


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def window(b, h, q_idx, kv_idx):
    return q_idx - kv_idx <= 37


def prefix(b, h, q_idx, kv_idx):
    return kv_idx < PREFIX[b]


def document(b, h, q_idx, kv_idx):
    return DOCUMENTS[q_idx] == DOCUMENTS[kv_idx]


def neighbours(b, h, q_idx, kv_idx):
    """NATTEN in two dimensions: a window of 5 by 5, kept inside the picture."""
    rows, columns = LENGTH // WIDTH, WIDTH
    seen = True
    for q, k, size in ((q_idx // WIDTH, kv_idx // WIDTH, rows), (q_idx % WIDTH, kv_idx % WIDTH, columns)):
        seen = ((q.clamp(2, size - 3) - k).abs() <= 2) & seen
    return seen


def dilated(b, h, q_idx, kv_idx):
    return ((q_idx - kv_idx) % 3 == 0) & (q_idx - kv_idx < 60)


def transfusion(b, h, q_idx, kv_idx):
    seen = q_idx >= kv_idx
    for first, last in MODALITY:
        seen = seen | ((q_idx >= first) & (q_idx < last) & (kv_idx >= first) & (kv_idx < last))
    return seen


def per_head(b, h, q_idx, kv_idx):
    return (q_idx >= kv_idx) & (q_idx - kv_idx < 30 * (h + 1))


def tree(b, h, q_idx, kv_idx):
    return TREE[q_idx, kv_idx]


def empty_rows(b, h, q_idx, kv_idx):
    return (q_idx >= kv_idx) & (q_idx % 7 != 3) & (q_idx < 150)


MASKS = {
    "causal": causal,
    "window": and_masks(causal, window),
    "sinks": and_masks(causal, or_masks(window, lambda b, h, q_idx, kv_idx: kv_idx < 4)),
    "prefix": or_masks(causal, prefix),
    "document": and_masks(causal, document),
    "neighbours": neighbours,
    "dilated": and_masks(causal, dilated),
    "transfusion": transfusion,
    "per head": per_head,
    "tree": tree,
    "empty rows": empty_rows,
}


def score_mods(heads, rows, keys):
    """Name: (score_mod, tensors that it captures and that require grad, whether it is fused)."""

    def learned(*shape):
        return (torch.randn(shape, dtype=torch.float64) / 2).requires_grad_()

    slopes = torch.tensor([2.0 ** -(1 + h) for h in range(heads)], dtype=torch.float64)
    slopes_learned = slopes.clone().requires_grad_()
    relative, table, by_head, by_key = learned(heads, rows + keys), learned(heads, rows, keys), learned(heads), learned(keys)
    buckets, scales, temperature = learned(8), learned(rows), learned()

    def soft(x):
        return 2.5 * torch.tanh(x / 2.5)

    def in_place(score, b, h, q_idx, kv_idx):
        score = score * 2
        score += by_key[kv_idx]
        return score

    def bucket(q_idx, kv_idx):
        return (q_idx - kv_idx).abs().clamp(max=7)

    return {
        "identity": (lambda score, b, h, q, k: score, (), True),
        "softcap": (lambda score, b, h, q, k: soft(score), (), True),
        "alibi": (lambda score, b, h, q, k: score + slopes[h] * (k - q), (), True),
        "alibi distance": (lambda score, b, h, q, k: score - (q - k).abs() * slopes[h], (), True),
        "alibi learned": (lambda score, b, h, q, k: score + (k - q) * slopes_learned[h], (slopes_learned,), True),
        "alibi of a power": (lambda score, b, h, q, k: score + (k - q) * torch.exp2(-((h + 1) * 8.0 / 4)), (), True),
        "relative": (lambda score, b, h, q, k: score + relative[h, q - k + keys], (relative,), True),
        "positions": (lambda score, b, h, q, k: score + (q - k), (), True),
        "table": (lambda score, b, h, q, k: score + table[h, q, k], (table,), True),
        "chained table": (lambda score, b, h, q, k: score + table[h][q][k], (table,), True),
        "key bias": (lambda score, b, h, q, k: score + by_key[k], (by_key,), True),
        "row bias": (lambda score, b, h, q, k: score + scales[q] - by_head[h] + by_key[k], (scales, by_head, by_key), True),
        "buckets": (lambda score, b, h, q, k: score + buckets[bucket(q, k)] * by_head[h], (buckets, by_head), True),
        "scaled by head": (lambda score, b, h, q, k: score * by_head[h], (by_head,), True),
        "scaled by row": (lambda score, b, h, q, k: score / (scales[q].exp() + temperature**2), (scales, temperature), True),
        "hidden": (lambda score, b, h, q, k: torch.where((q - k) % 3 == 0, score, -float("inf")), (), True),
        "hidden by a term": (
            lambda score, b, h, q, k: score + torch.where(q >= k, by_key[k], -float("inf")), (by_key,), True),
        "either": (lambda score, b, h, q, k: torch.where(q >= k, score + by_head[h], score), (by_head,), True),
        "sum": (
            lambda score, b, h, q, k: soft(score * 1.3) + by_key[k] + relative[h, q - k + keys] - slopes[h] * (q - k),
            (by_key, relative), True),
        "in place": (in_place, (by_key,), True),
        "negative": (lambda score, b, h, q, k: -soft(-score * by_head[h]) - 1, (by_head,), True),
        "square": (lambda score, b, h, q, k: score - score.square() / 9 * by_head[h], (by_head,), False),
        "two softcaps": (lambda score, b, h, q, k: soft(soft(score) + by_key[k]), (by_key,), False),
        "finite mask": (lambda score, b, h, q, k: torch.where(q >= k, score, -50.0), (), False),
        "learned softcap": (lambda score, b, h, q, k: temperature * torch.tanh(score / temperature), (temperature,), False),
    }  # fmt: skip


def modified(score_mod, scores):
    """score_mod of [B, H, Q, K]."""
    for dims in ((None, None, None, 0), (None, None, 0, None), (None, 0, None, None), (0, None, None, None)):
        score_mod = torch.vmap(score_mod, (0, *dims))
    with ReadByTensor():  # PyTorch's own has no gradient of x[i][j]
        return score_mod(scores, *(torch.arange(n) for n in scores.shape))


def answer(q, k, v, score_mod, visible, scale):
    """out and lse in float64; visible: bool, broadcastable to [B, H, Q, K], or None."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.expand(q.shape[0], -1, -1, -1).repeat_interleave(group, 1) for x in (k, v))
    scores = q @ k.mT * (scale if scale is not None else 1 / math.sqrt(q.shape[3]))
    if score_mod is not None:
        scores = modified(score_mod, scores)
    if visible is not None:
        scores = scores.masked_fill(~visible, -math.inf)
    lse = scores.logsumexp(-1)
    p = torch.exp(scores - lse.masked_fill(lse == -math.inf, math.inf)[..., None])
    return p @ v, lse
