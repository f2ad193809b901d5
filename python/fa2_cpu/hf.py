# SPDX-License-Identifier: Apache-2.0
"""attn_implementation="fa2" for Hugging Face transformers, and whole models on fa2.

    import fa2_cpu.hf
    fa2_cpu.hf.register()
    model = AutoModelForCausalLM.from_config(config, attn_implementation="fa2")
    fa2_cpu.hf.accelerate(model)   # norms, rotary embeddings, SwiGLU and the loss besides

Trains and generates on CPU, with padding, static and dynamic caches, grouped queries, sliding
windows, softcap and sinks. Causal masks, windows and padding are not formed as [N, N] arrays; other
patterns (chunked attention, packed position ids, custom masks) use transformers' boolean masks.
"""

from fa2_cpu._hf_accelerate import Acceleration, accelerate, acceleration
from fa2_cpu._hf_attention import register

__all__ = ["Acceleration", "accelerate", "acceleration", "register"]
