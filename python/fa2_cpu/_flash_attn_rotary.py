# SPDX-License-Identifier: Apache-2.0
"""flash_attn.layers.rotary on fa2's kernel: the functions and RotaryEmbedding of flash-attn 2.8.3."""

from __future__ import annotations

from typing import Any, Optional, Union

import torch
from torch import Tensor, nn

from fa2_cpu.torch import apply_rotary_emb as _rotate_rows

__all__ = [
    "RotaryEmbedding", "apply_rotary_emb", "apply_rotary_emb_func", "apply_rotary_emb_kv_", "apply_rotary_emb_qkv_",
    "apply_rotary_emb_torch", "rotate_half",
]  # fmt: skip

Offsets = Union[int, Tensor]


def _angles(table: Tensor, x: Tensor, offsets: Offsets, cu_seqlens: Optional[Tensor]) -> Tensor:
    """The rows of table [positions, R/2] for the positions of x: [N, R/2] or [B, N, R/2]."""
    if cu_seqlens is not None:
        starts = cu_seqlens.long()
        positions = torch.arange(x.shape[0])
        document = torch.searchsorted(starts, positions, right=True) - 1
        positions = positions - starts[document]
        return table[positions + (offsets if isinstance(offsets, int) else offsets.long()[document])]
    if isinstance(offsets, int):
        return table[offsets : offsets + x.shape[1]]
    return table[offsets.long()[:, None] + torch.arange(x.shape[1])]


def apply_rotary_emb(
    x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False, inplace: bool = False, seqlen_offsets: Offsets = 0,
    cu_seqlens: Optional[Tensor] = None, max_seqlen: Optional[int] = None,
) -> Tensor:  # fmt: skip
    """Turns the first R elements of each head by the angles of its position.

    Args:
      x: [B, N, H, D], or [total, H, D] with cu_seqlens.
      cos, sin: [positions, R/2].
      interleaved: pairs are (2i, 2i + 1); else (i, i + R/2).
      inplace: x itself is changed and returned.
      seqlen_offsets: what is added to each position; an int, or int [B].
    """
    cos, sin = (_angles(table, x, seqlen_offsets, cu_seqlens) for table in (cos, sin))
    rows = x.unsqueeze(0) if cu_seqlens is not None else x
    out = _rotate_rows(rows, cos, sin, interleaved=interleaved, layout="bshd").reshape(x.shape)
    return x.copy_(out) if inplace else out


apply_rotary_emb_func = apply_rotary_emb


def apply_rotary_emb_qkv_(
    qkv: Tensor, cos: Tensor, sin: Tensor, cos_k: Optional[Tensor] = None, sin_k: Optional[Tensor] = None,
    interleaved: bool = False, seqlen_offsets: Offsets = 0, num_heads_q: Optional[int] = None,
) -> Tensor:  # fmt: skip
    """apply_rotary_emb on q and k in place: qkv [B, N, 3, H, D], or [B, N, Hq + 2 Hkv, D] with num_heads_q."""
    if qkv.dim() == 5:
        q, k = qkv[:, :, 0], qkv[:, :, 1]
    else:
        if num_heads_q is None:
            raise ValueError(f"qkv has shape {tuple(qkv.shape)} and num_heads_q is None; it must be given")
        kv_heads = (qkv.shape[2] - num_heads_q) // 2
        q, k = qkv[:, :, :num_heads_q], qkv[:, :, num_heads_q : num_heads_q + kv_heads]
    apply_rotary_emb(q, cos, sin, interleaved, True, seqlen_offsets)
    apply_rotary_emb(k, cos if cos_k is None else cos_k, sin if sin_k is None else sin_k, interleaved, True, seqlen_offsets)
    return qkv


def apply_rotary_emb_kv_(
    kv: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False, seqlen_offsets: Offsets = 0
) -> Tensor:
    """apply_rotary_emb on k of kv [B, N, 2, H, D], in place."""
    apply_rotary_emb(kv[:, :, 0], cos, sin, interleaved, True, seqlen_offsets)
    return kv


def rotate_half(x: Tensor, interleaved: bool = False) -> Tensor:
    """(−x₂, x₁) of the pairs (x₁, x₂)."""
    if interleaved:
        return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)


def apply_rotary_emb_torch(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """The same by PyTorch's operators: x [B, N, H, D], cos and sin [N, R/2] or [B, N, R/2]."""
    rotated = cos.shape[-1] * 2
    double = (lambda t: t.repeat_interleave(2, -1)) if interleaved else (lambda t: torch.cat((t, t), -1))
    cos, sin = (double(t).unsqueeze(-2) for t in (cos, sin))
    head, rest = x[..., :rotated], x[..., rotated:]
    return torch.cat((head * cos + rotate_half(head, interleaved) * sin, rest), -1)


class RotaryEmbedding(nn.Module):
    """Rotary position embeddings (Su et al. 2021); with scale_base those of XPos (Sun et al. 2022).

    Args:
      dim: R, the number of elements of a head that are turned.
      base: of the frequencies base^(−2i / R).
      interleaved: as for apply_rotary_emb.
    """

    def __init__(
        self, dim: int, base: float = 10000.0, interleaved: bool = False, scale_base: Optional[float] = None,
        device: Any = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.dim, self.base, self.interleaved, self.scale_base = dim, float(base), interleaved, scale_base
        self.register_buffer("inv_freq", self._compute_inv_freq(device), persistent=False)
        scale = None
        if scale_base is not None:
            scale = (torch.arange(0, dim, 2, device=device, dtype=torch.float32) + 0.4 * dim) / (1.4 * dim)
        self.register_buffer("scale", scale, persistent=False)
        self._seq_len_cached = 0
        self._cos_cached = self._sin_cached = self._cos_k_cached = self._sin_k_cached = None

    def _compute_inv_freq(self, device: Any = None) -> Tensor:
        return 1.0 / (self.base ** (torch.arange(0, self.dim, 2, device=device, dtype=torch.float32) / self.dim))

    def _update_cos_sin_cache(self, seqlen: int, device: Any = None, dtype: Optional[torch.dtype] = None) -> None:
        if seqlen <= self._seq_len_cached and self._cos_cached is not None and self._cos_cached.dtype == dtype:
            return
        self._seq_len_cached = seqlen
        # In f32 whatever the model's dtype: positions are large.
        inverse = self.inv_freq if self.inv_freq.dtype == torch.float32 else self._compute_inv_freq(device)
        angles = torch.outer(torch.arange(seqlen, device=device, dtype=torch.float32), inverse)
        if self.scale is None:
            self._cos_cached, self._sin_cached = angles.cos().to(dtype), angles.sin().to(dtype)
            return
        power = (torch.arange(seqlen, dtype=self.scale.dtype) - seqlen // 2) / self.scale_base
        scale = self.scale ** power[:, None]
        self._cos_cached, self._sin_cached = (angles.cos() * scale).to(dtype), (angles.sin() * scale).to(dtype)
        self._cos_k_cached, self._sin_k_cached = (angles.cos() / scale).to(dtype), (angles.sin() / scale).to(dtype)

    def forward(
        self, qkv: Tensor, kv: Optional[Tensor] = None, seqlen_offset: Offsets = 0, max_seqlen: Optional[int] = None,
        num_heads_q: Optional[int] = None,
    ) -> Any:  # fmt: skip
        """qkv as apply_rotary_emb_qkv_ takes it; or q [B, N, H, D] and kv [B, N, 2, H, D], both returned. In place."""
        if max_seqlen is not None:
            self._update_cos_sin_cache(max_seqlen, qkv.device, qkv.dtype)
        elif isinstance(seqlen_offset, int):
            self._update_cos_sin_cache(qkv.shape[1] + seqlen_offset, qkv.device, qkv.dtype)
        cos, sin, cos_k, sin_k = self._cos_cached, self._sin_cached, self._cos_k_cached, self._sin_k_cached
        if kv is None:
            return apply_rotary_emb_qkv_(qkv, cos, sin, cos_k, sin_k, self.interleaved, seqlen_offset, num_heads_q)
        q = apply_rotary_emb(qkv, cos, sin, self.interleaved, True, seqlen_offset)
        if self.scale is not None:
            cos, sin = cos_k, sin_k
        return q, apply_rotary_emb_kv_(kv, cos, sin, self.interleaved, seqlen_offset)
