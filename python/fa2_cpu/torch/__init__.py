# SPDX-License-Identifier: Apache-2.0
"""fa2 for PyTorch (2.6 or newer): differentiable attention for CPU tensors, and PyTorch's own entry points on it.

    import fa2_cpu.torch
    out = fa2_cpu.torch.scaled_dot_product_attention(q, k, v, is_causal=True)   # one call
    fa2_cpu.torch.replace_sdpa()                                                # every call of the process
    with fa2_cpu.torch.replace_sdpa(): ...                                      # every call in a block
    fa2_cpu.torch.replace_flex_attention()                                      # FlexAttention, with a gradient
    loss = fa2_cpu.torch.linear_cross_entropy(hidden, lm_head.weight, labels)   # the rest of a step

With a PyTorch that has torch.nn.attention.activate_flash_attention_impl, importing this module
registers the implementation "fa2" there. See docs/python.md.
"""

import fa2_cpu.torch._aten as _aten
from fa2_cpu.torch._aten import is_active, replace_sdpa
from fa2_cpu.torch._causal_attention import causal_attention
from fa2_cpu.torch._cross_entropy import cross_entropy
from fa2_cpu.torch._embedding import embedding
from fa2_cpu.torch._flex._attention import flex_attention
from fa2_cpu.torch._flex._create import create_block_mask
from fa2_cpu.torch._flex._replace import replace_flex_attention
from fa2_cpu.torch._linear_cross_entropy import linear_cross_entropy
from fa2_cpu.torch._ops import attention
from fa2_cpu.torch._rms_norm import rms_norm
from fa2_cpu.torch._rotary import apply_rotary_emb, apply_rotary_pos_emb
from fa2_cpu.torch._sdpa import scaled_dot_product_attention
from fa2_cpu.torch._softmax import softmax
from fa2_cpu.torch._swiglu import swiglu

__all__ = [
    "apply_rotary_emb",
    "apply_rotary_pos_emb",
    "attention",
    "causal_attention",
    "create_block_mask",
    "cross_entropy",
    "embedding",
    "flex_attention",
    "is_active",
    "linear_cross_entropy",
    "replace_flex_attention",
    "replace_sdpa",
    "rms_norm",
    "scaled_dot_product_attention",
    "softmax",
    "swiglu",
]

_aten.register_implementation()
