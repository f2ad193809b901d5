# SPDX-License-Identifier: Apache-2.0
"""attn_implementation="fa2" of transformers: its mask and its attention function."""

from __future__ import annotations

from typing import Any, Optional

import torch
from torch import Tensor

from fa2_cpu.torch._ops import attention
from fa2_cpu.torch._sdpa import autocast


def _plain_window(config: Any, local_size: Optional[int]) -> bool:
    """Whether local_size is the window that the layers hand to _attention_forward as sliding_window."""
    if local_size is None:
        return True
    return getattr(config, "sliding_window", None) == local_size and not getattr(config, "attention_chunk_size", None)


def _mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: int = 0,
    attention_mask: Optional[Tensor] = None,
    local_size: Optional[int] = None,
    allow_is_causal_skip: bool = True,
    config: Any = None,
    **keywords: Any,
) -> Optional[Tensor]:
    """The mask of a forward pass: None or [B, 1, 1, Nk] (padding) where the layer's own causal flag and
    window say the rest, which needs as many keys as queries; else bool [B, 1, Nq, Nk]."""
    from transformers.masking_utils import sdpa_mask

    whole = isinstance(q_offset, int) and q_offset == 0 and kv_offset == 0 and 1 < q_length == kv_length
    if allow_is_causal_skip and whole and _plain_window(config, local_size):
        if attention_mask is None:
            return None
        if attention_mask.dim() == 2 and attention_mask.shape[1] == kv_length:
            if not torch.compiler.is_compiling() and bool(attention_mask.all()):
                return None
            return attention_mask.bool()[:, None, None, :]
    return sdpa_mask(
        batch_size=batch_size, q_length=q_length, kv_length=kv_length, q_offset=q_offset, kv_offset=kv_offset,
        attention_mask=attention_mask, local_size=local_size, allow_is_causal_skip=allow_is_causal_skip,
        config=config, **keywords,
    )  # fmt: skip


def _with_position_bias(mask: Optional[Tensor], position_bias: Optional[Tensor]) -> Optional[Tensor]:
    if position_bias is None or mask is None:
        return mask if position_bias is None else position_bias
    if mask.dtype == torch.bool:
        return position_bias.masked_fill(~mask, -torch.inf)
    return position_bias + mask


def _attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Optional[Tensor],
    dropout: float = 0.0,
    scaling: Optional[float] = None,
    sliding_window: Optional[int] = None,
    softcap: Optional[float] = None,
    is_causal: Optional[bool] = None,
    s_aux: Optional[Tensor] = None,
    position_bias: Optional[Tensor] = None,
    cache: Any = None,
    cu_seq_lens_q: Optional[Tensor] = None,
    cu_seq_lens_k: Optional[Tensor] = None,
    max_length_q: Optional[int] = None,
    max_length_k: Optional[int] = None,
    **keywords: Any,
) -> tuple[Tensor, None]:
    """query [B, Hq, Nq, D], key and value [B, Hkv, Nk, D]; returns ([B, Nq, Hq, D], None).

    cu_seq_lens_q and cu_seq_lens_k (int [documents + 1], of DataCollatorWithFlattening and the like)
    are prefix sums of the lengths of documents packed into one row: each attends to itself alone.
    """
    if cache is not None and hasattr(cache, "update"):
        key, value = cache.update(key_states=key, value_states=value, layer_idx=module.layer_idx, kwargs=keywords)
    query, key, value = (autocast(x) for x in (query, key, value))
    if query.dtype != value.dtype:
        # Rotary embeddings or norms in f32 must not widen the products.
        query, key = query.to(value.dtype), key.to(value.dtype)
    queries, keys = query.shape[2], key.shape[2]
    packed = cu_seq_lens_q is not None and cu_seq_lens_k is not None
    is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    # A full mask says everything; without one, or with padding only, causality and window are left. Of packed documents
    # the prefix sums say what they see.
    padding_only = packed or attention_mask is None or attention_mask.shape[-2] == 1
    causal = "top_left" if is_causal and padding_only and queries > 1 else None
    window = (-1, -1)
    if causal is not None:
        if sliding_window is not None:
            window = (sliding_window - 1, -1)
        if attention_mask is None and keys > queries:
            # The first pass over a static cache: the rows behind the queries are not filled yet.
            key, value = key[:, :, :queries], value[:, :, :queries]
            position_bias = None if position_bias is None else position_bias[..., :queries]
    options = dict(
        scale=scaling,
        causal=causal,
        window=window,
        softcap=softcap or 0.0,
        sinks=None if s_aux is None else s_aux.float(),
        dropout_p=dropout,
    )
    if packed:
        return _packed(query, key, value, attention_mask, position_bias, cu_seq_lens_q, cu_seq_lens_k,
                       max_length_q, max_length_k, options), None  # fmt: skip
    bias = _with_position_bias(attention_mask, position_bias)
    out, _ = attention(query, key, value, bias=bias, **options)
    return out.transpose(1, 2).contiguous(), None


def _hides_more(mask: Tensor, ends: Tensor, causal: Optional[str], window: tuple[int, int]) -> bool:
    """Whether a full mask [1, 1, N, N] is another than that of documents, which transformers forms from position_ids."""
    if mask.dtype != torch.bool or mask.shape[:2] != (1, 1) or mask.shape[2] != mask.shape[3]:
        return True
    count = mask.shape[2]
    keys = torch.arange(count, device=mask.device)
    documents = torch.searchsorted(ends.to(keys.dtype), keys, right=True)
    # Some rows at a time: no second mask of all scores.
    for first in range(0, count, 512):
        rows = keys[first : first + 512, None]
        seen = documents[rows] == documents
        if causal is not None:
            seen &= keys <= rows
            if window[0] >= 0:
                seen &= keys >= rows - window[0]
        if not torch.equal(mask[0, 0, first : first + 512], seen):
            return True
    return False


def _packed(query, key, value, attention_mask, position_bias, cu_seqlens_q, cu_seqlens_k, max_q, max_k, options):
    """Documents in one row: [1, H, N, D] as [N, H, D]; returns [1, N, Hq, D]."""
    if query.shape[0] != 1:
        raise ValueError(f"cu_seq_lens_q is given with a batch of {query.shape[0]}; packed documents are one row")
    if position_bias is not None:
        raise ValueError("position_bias is given with cu_seq_lens_q; packed documents take no bias")
    if attention_mask is not None and attention_mask.shape[-2] == 1 and not bool(attention_mask.all()):
        raise ValueError("attention_mask masks positions of packed documents; leave padding out of cu_seq_lens_q")
    if attention_mask is not None and attention_mask.shape[-2] != 1 and _hides_more(
        attention_mask, cu_seqlens_k, options["causal"], options["window"]
    ):
        raise ValueError(
            "attention_mask and cu_seq_lens_q are given and differ; packed documents are told by position_ids and "
            "prefix sums that agree, or by one of them"
        )
    if key.shape[2] != int(cu_seqlens_k[-1]) or query.shape[2] != int(cu_seqlens_q[-1]):
        raise ValueError(
            f"query and key have {query.shape[2]} and {key.shape[2]} positions, cu_seq_lens_q and cu_seq_lens_k end "
            f"at {int(cu_seqlens_q[-1])} and {int(cu_seqlens_k[-1])}; packed documents must fill the row"
        )
    rows = (x[0].transpose(0, 1) for x in (query, key, value))
    out, _ = attention(
        *rows, layout="thd", cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k,
        max_seqlen_q=int(max_q or 0), max_seqlen_k=int(max_k or 0), **options,
    )  # fmt: skip
    return out.unsqueeze(0)


def register(name: str = "fa2") -> None:
    """Makes attn_implementation=name known to transformers (4.56 or newer).

    Example:
      >>> import fa2_cpu.hf, transformers
      >>> fa2_cpu.hf.register()
      >>> sizes = dict(hidden_size=32, intermediate_size=64, num_attention_heads=2, num_hidden_layers=1, vocab_size=50)
      >>> config = transformers.LlamaConfig(**sizes, num_key_value_heads=1)
      >>> model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="fa2")
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(name, _attention_forward)
    AttentionMaskInterface.register(name, _mask)
