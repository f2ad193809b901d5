"""fa2 for PyTorch (2.6 or newer): differentiable attention for CPU tensors, and PyTorch's own entry points on it.

    import fa2_cpu.torch
    out = fa2_cpu.torch.scaled_dot_product_attention(q, k, v, is_causal=True)   # one call
    fa2_cpu.torch.replace_sdpa()                                                # every call of the process
    with fa2_cpu.torch.replace_sdpa(): ...                                      # every call in a block

With a PyTorch that has torch.nn.attention.activate_flash_attention_impl, importing this module
registers the implementation "fa2" there. See docs/python.md.
"""

import fa2_cpu.torch._aten as _aten
from fa2_cpu.torch._aten import replace_sdpa
from fa2_cpu.torch._ops import attention
from fa2_cpu.torch._sdpa import scaled_dot_product_attention

__all__ = ["attention", "replace_sdpa", "scaled_dot_product_attention"]

_aten.register_implementation()
