# SPDX-License-Identifier: Apache-2.0
"""Every example of the public docstrings runs as it is printed."""

import doctest
import importlib

import pytest

MODULES = {
    "fa2_cpu": None, "fa2_cpu._attention": None, "fa2_cpu._training_ops": None, "fa2_cpu.reference": None,
    "fa2_cpu.testing": None, "fa2_cpu.flash_attn": "torch", "fa2_cpu._flash_attn_kvcache": "torch",
    "fa2_cpu.bert_padding": "torch", "fa2_cpu.distributed._attention": "torch",
    "fa2_cpu.distributed._context": "torch", "fa2_cpu.distributed._parts": "torch",
    "fa2_cpu.jax": "jax", "fa2_cpu._hf_accelerate": "transformers", "fa2_cpu._hf_attention": "transformers",
    "fa2_cpu.torch._ops": "torch", "fa2_cpu.torch._sdpa": "torch", "fa2_cpu.torch._aten": "torch",
    "fa2_cpu.torch._causal_attention": "torch", "fa2_cpu.torch._cross_entropy": "torch",
    "fa2_cpu.torch._embedding": "torch", "fa2_cpu.torch._linear_cross_entropy": "torch",
    "fa2_cpu.torch._rms_norm": "torch", "fa2_cpu.torch._rotary": "torch", "fa2_cpu.torch._softmax": "torch",
    "fa2_cpu.torch._swiglu": "torch", "fa2_cpu.torch._flex._attention": "torch",
    "fa2_cpu.torch._flex._create": "torch", "fa2_cpu.torch._flex._replace": "torch",
}  # fmt: skip
WITHOUT_EXAMPLES = {"fa2_cpu"}


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings(name):
    if MODULES[name] is not None:
        pytest.importorskip(MODULES[name])
    result = doctest.testmod(importlib.import_module(name))
    assert result.failed == 0
    assert result.attempted > 0 or name in WITHOUT_EXAMPLES


def test_signatures_spell_the_options_out():
    import inspect

    import fa2_cpu as fa2

    for name in ("attention_forward", "attention_backward"):
        ours, reference = (inspect.signature(getattr(module, name)) for module in (fa2, fa2.reference))
        assert list(ours.parameters) == list(reference.parameters)
        assert "Literal['bhsd', 'bshd', 'thd']" in str(ours)
    with pytest.raises(TypeError, match="unexpected keyword argument 'casual'.*causal"):
        fa2.attention_forward(None, None, None, casual="top_left")
