# SPDX-License-Identifier: Apache-2.0
"""Padded batches to packed sequences and back: the functions of flash_attn.bert_padding."""

from __future__ import annotations

from typing import Optional

import torch
from torch import Tensor

__all__ = [
    "index_first_axis", "index_first_axis_residual", "index_put_first_axis", "pad_input", "unpad_input",
    "unpad_input_for_concatenated_sequences",
]  # fmt: skip


def index_first_axis(x: Tensor, indices: Tensor) -> Tensor:
    """x[indices]: [rows, ...] and int64 [n] give [n, ...]; differentiable."""
    return x.index_select(0, indices)


def index_first_axis_residual(x: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    """(x[indices], x), for a residual connection beside the rows that are taken; differentiable."""
    return index_first_axis(x, indices), x


def index_put_first_axis(values: Tensor, indices: Tensor, first_axis_dim: int) -> Tensor:
    """Zeros [first_axis_dim, ...] with values [n, ...] at the rows indices; differentiable."""
    return values.new_zeros((first_axis_dim, *values.shape[1:])).index_copy(0, indices, values)


def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Optional[Tensor] = None
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """The rows of a padded batch that count.

    Args:
      hidden_states: [B, N, ...]. attention_mask: [B, N], 1 or True where a token counts. unused_mask:
        [B, N], tokens that are kept in memory without taking part.

    Returns:
      rows [total, ...]; their int64 indices into [B · N]; int32 prefix sums [B + 1]; the longest
      length; the int32 number of tokens that count in each sequence [B].

    Example:
      >>> import torch
      >>> from fa2_cpu.bert_padding import pad_input, unpad_input
      >>> x, mask = torch.randn(2, 3, 4), torch.tensor([[1, 1, 0], [1, 1, 1]])
      >>> rows, indices, cu_seqlens, longest, used = unpad_input(x, mask)
      >>> rows.shape, cu_seqlens.tolist(), longest
      (torch.Size([5, 4]), [0, 2, 5], 3)
      >>> torch.equal(pad_input(rows, indices, 2, 3), x * mask.unsqueeze(-1))
      True
    """
    kept = attention_mask if unused_mask is None else attention_mask + unused_mask
    lengths = kept.sum(-1, dtype=torch.int32)
    used = attention_mask.sum(-1, dtype=torch.int32)
    indices = torch.nonzero(kept.flatten()).flatten()
    cu_seqlens = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    longest = int(lengths.max()) if lengths.numel() else 0
    return index_first_axis(hidden_states.flatten(0, 1), indices), indices, cu_seqlens, longest, used


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """The inverse of unpad_input: [total, ...] to [batch, seqlen, ...], zeros elsewhere."""
    return index_put_first_axis(hidden_states, indices, batch * seqlen).unflatten(0, (batch, seqlen))


def unpad_input_for_concatenated_sequences(
    hidden_states: Tensor, attention_mask_in_length: Tensor
) -> tuple[Tensor, Tensor, Tensor, int]:
    """unpad_input of rows that each hold several sequences, one behind the other.

    Args:
      hidden_states: [B, N, ...]. attention_mask_in_length: int [B, N], the lengths of a row's sequences, then 0.

    Returns:
      rows [total, ...]; their int64 indices into [B · N]; int32 prefix sums [sequences + 1]; the longest length.
    """
    count = attention_mask_in_length.shape[-1]
    kept = torch.arange(count) < attention_mask_in_length.sum(-1, keepdim=True)
    lengths = attention_mask_in_length[attention_mask_in_length != 0]
    rows, indices, *_ = unpad_input(hidden_states, kept)
    cu_seqlens = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    return rows, indices, cu_seqlens, int(lengths.max()) if lengths.numel() else 0
