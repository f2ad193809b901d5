# SPDX-License-Identifier: Apache-2.0
"""create_block_mask: PyTorch's function, chunk by chunk."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Optional, Union

import torch
import torch.nn.attention.flex_attention as pytorch
from torch import Tensor

from fa2_cpu.torch._flex._of_pytorch import keep_lists
from fa2_cpu.torch._flex._original import create_block_mask as pytorch_create_block_mask
from fa2_cpu.torch._flex._table import block_lists, of_mask_mod
from fa2_cpu.torch._not_compiled import not_compiled


@not_compiled
def create_block_mask(
    mask_mod: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor],
    B: Optional[int],
    H: Optional[int],
    Q_LEN: int,
    KV_LEN: int,
    device: Any = "cpu",
    BLOCK_SIZE: Union[int, tuple[int, int]] = 128,
    _compile: bool = False,
    separate_full_blocks: bool = True,
    **others: Any,
) -> pytorch.BlockMask:
    """torch.nn.attention.flex_attention.create_block_mask without a mask of N² elements.

    mask_mod is evaluated over some rows of blocks at a time. The bits of the blocks that are visible in part are kept
    with the result, so that flex_attention does not evaluate mask_mod again.

    Args:
      mask_mod: of b, h, q_idx and kv_idx, integer tensors of no dimension; True where the query sees the key.
      B, H: None is 1, which every batch element or head shares.
      device: where the result's tensors live; for another device than "cpu" PyTorch's function is called.
      BLOCK_SIZE: queries and keys of a block, or one number for both.
      _compile: of no effect.
      separate_full_blocks: whether blocks that are visible altogether have lists of their own.

    Returns:
      torch.nn.attention.flex_attention.BlockMask, equal to PyTorch's.

    Raises:
      TypeError: a mask_mod that does not give bool.
      ValueError: sizes that are no positive numbers.

    Example:
      >>> import fa2_cpu.torch
      >>> mask = fa2_cpu.torch.create_block_mask(lambda b, h, q, k: q >= k, None, None, 1024, 1024)
      >>> mask.kv_num_blocks.tolist()[0][0], mask.full_kv_num_blocks.tolist()[0][0]
      ([1, 1, 1, 1, 1, 1, 1, 1], [0, 1, 2, 3, 4, 5, 6, 7])
    """
    if torch.device(device or "cpu").type != "cpu" or others.get("compute_dq_write_order"):
        if not separate_full_blocks:
            others["separate_full_blocks"] = False
        return pytorch_create_block_mask(mask_mod, B, H, Q_LEN, KV_LEN, device, BLOCK_SIZE, **others)
    B, H = (1 if x is None else x for x in (B, H))
    sizes = (BLOCK_SIZE, BLOCK_SIZE) if isinstance(BLOCK_SIZE, int) else tuple(BLOCK_SIZE)
    for name, value in (("B", B), ("H", H), ("Q_LEN", Q_LEN), ("KV_LEN", KV_LEN), *(("BLOCK_SIZE", x) for x in sizes)):
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} is {value!r}; it must be an int of at least 1")
    lists = block_lists(of_mask_mod(mask_mod, B, H, KV_LEN), B * H, Q_LEN, KV_LEN, sizes, separate_full_blocks)
    shared = [x for kind in (lists.partial, lists.full) if kind is not None for x in kind]
    shared = [x.expand(B, H, *x.shape[2:]).contiguous() for x in shared]
    result = pytorch.BlockMask.from_kv_blocks(
        *shared, BLOCK_SIZE=sizes, mask_mod=mask_mod, seq_lengths=(Q_LEN, KV_LEN)
    )
    if sizes[0] % 16 == 0 and sizes[1] % 16 == 0:
        keep_lists(result, lists)
    return result
