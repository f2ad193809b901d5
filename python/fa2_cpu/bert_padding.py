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
    """x[indices]: [rows, ...] and int64 [n] give [n, ...]; differentiable.

    Raises:
      IndexError: an index that is no row of x.

    Example:
      >>> import torch
      >>> from fa2_cpu.bert_padding import index_first_axis
      >>> index_first_axis(torch.tensor([[1.0], [2.0], [3.0]]), torch.tensor([2, 0])).tolist()
      [[3.0], [1.0]]
    """
    return x.index_select(0, indices)


def index_first_axis_residual(x: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    """(x[indices], x), for a residual connection beside the rows that are taken; differentiable.

    Raises:
      IndexError: an index that is no row of x.

    Example:
      >>> import torch
      >>> from fa2_cpu.bert_padding import index_first_axis_residual
      >>> rows, x = index_first_axis_residual(torch.tensor([[1.0], [2.0]]), torch.tensor([1]))
      >>> rows.tolist(), x.tolist()
      ([[2.0]], [[1.0], [2.0]])
    """
    return index_first_axis(x, indices), x


def index_put_first_axis(values: Tensor, indices: Tensor, first_axis_dim: int) -> Tensor:
    """Zeros [first_axis_dim, ...] with values [n, ...] at the rows indices; differentiable.

    Raises:
      IndexError: an index that is not below first_axis_dim, or not one for each row of values.

    Example:
      >>> import torch
      >>> from fa2_cpu.bert_padding import index_put_first_axis
      >>> index_put_first_axis(torch.tensor([[5.0], [6.0]]), torch.tensor([2, 0]), 3).tolist()
      [[6.0], [0.0], [5.0]]
    """
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

    Raises:
      ValueError: a mask whose shape is not that of the first two dimensions.

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
    for name, mask in (("attention_mask", attention_mask), ("unused_mask", unused_mask)):
        if mask is not None and mask.shape != hidden_states.shape[:2]:
            raise ValueError(
                f"{name} has shape {tuple(mask.shape)}; it must be {tuple(hidden_states.shape[:2])}, the first two "
                "dimensions of hidden_states"
            )
    kept = attention_mask if unused_mask is None else attention_mask + unused_mask
    lengths = kept.sum(-1, dtype=torch.int32)
    used = attention_mask.sum(-1, dtype=torch.int32)
    indices = torch.nonzero(kept.flatten()).flatten()
    cu_seqlens = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    longest = int(lengths.max()) if lengths.numel() else 0
    return index_first_axis(hidden_states.flatten(0, 1), indices), indices, cu_seqlens, longest, used


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """The inverse of unpad_input: [total, ...] to [batch, seqlen, ...], zeros elsewhere.

    Raises:
      IndexError: an index that is not below batch · seqlen, or not one for each row.

    Example:
      >>> import torch
      >>> from fa2_cpu.bert_padding import pad_input
      >>> pad_input(torch.tensor([[1.0], [2.0], [3.0]]), torch.tensor([0, 2, 3]), 2, 2).flatten(1).tolist()
      [[1.0, 0.0], [2.0, 3.0]]
    """
    return index_put_first_axis(hidden_states, indices, batch * seqlen).unflatten(0, (batch, seqlen))


def unpad_input_for_concatenated_sequences(
    hidden_states: Tensor, attention_mask_in_length: Tensor
) -> tuple[Tensor, Tensor, Tensor, int]:
    """unpad_input of rows that each hold several sequences, one behind the other.

    Args:
      hidden_states: [B, N, ...]. attention_mask_in_length: int [B, N], the lengths of a row's sequences, then 0.

    Returns:
      rows [total, ...]; their int64 indices into [B · N]; int32 prefix sums [sequences + 1]; the longest length.

    Raises:
      ValueError: lengths whose shape is not that of the first two dimensions.

    Example:
      >>> import torch
      >>> from fa2_cpu.bert_padding import unpad_input_for_concatenated_sequences
      >>> lengths = torch.tensor([[2, 1, 0, 0], [3, 0, 0, 0]])  # two sequences in the first row, one in the second
      >>> rows, indices, cu_seqlens, longest = unpad_input_for_concatenated_sequences(torch.randn(2, 4, 8), lengths)
      >>> rows.shape, cu_seqlens.tolist(), longest
      (torch.Size([6, 8]), [0, 2, 3, 6], 3)
    """
    if attention_mask_in_length.shape != hidden_states.shape[:2]:
        raise ValueError(
            f"attention_mask_in_length has shape {tuple(attention_mask_in_length.shape)}; it must be "
            f"{tuple(hidden_states.shape[:2])}, the first two dimensions of hidden_states"
        )
    count = attention_mask_in_length.shape[-1]
    kept = torch.arange(count) < attention_mask_in_length.sum(-1, keepdim=True)
    lengths = attention_mask_in_length[attention_mask_in_length != 0]
    rows, indices, *_ = unpad_input(hidden_states, kept)
    cu_seqlens = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    return rows, indices, cu_seqlens, int(lengths.max()) if lengths.numel() else 0
