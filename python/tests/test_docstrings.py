# SPDX-License-Identifier: Apache-2.0
"""Every example of the public docstrings runs as it is printed."""

import doctest
import importlib
import importlib.util
import inspect
import sys

import pytest

from fa2_cpu import _core

HAS_CHECKER = hasattr(_core, "verify")
HAS_PYTORCH = importlib.util.find_spec("torch") is not None

MODULES = {
    "fa2_cpu": None, "fa2_cpu._attention": None, "fa2_cpu._training_ops": None, "fa2_cpu.reference": None,
    "fa2_cpu._block_mask": None, "fa2_cpu._verify": None, "fa2_cpu.testing": None, "fa2_cpu.flash_attn": "torch", "fa2_cpu._flash_attn_kvcache": "torch",
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
CHECKER = {"fa2_cpu.capture", "fa2_cpu._verify.verify", "fa2_cpu.testing.assert_attention_gradients"}
PYTORCH = {"fa2_cpu.capture", "fa2_cpu.testing.assert_attention_gradients"}
# Public functions and their examples, by the module that a user imports and what it needs.
PUBLIC = {
    "fa2_cpu": None, "fa2_cpu.reference": None, "fa2_cpu.testing": None, "fa2_cpu.torch": "torch",
    "fa2_cpu.flash_attn": "torch", "fa2_cpu.bert_padding": "torch", "fa2_cpu.distributed": "torch",
    "fa2_cpu.hf": "transformers", "fa2_cpu.jax": "jax",
}  # fmt: skip


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings(name):
    if MODULES[name] is not None:
        pytest.importorskip(MODULES[name])
    module = importlib.import_module(name)
    examples = [test for test in doctest.DocTestFinder().find(module) if test.examples]
    assert examples
    before = set(sys.modules)
    try:
        for test in examples:
            if not (test.name in CHECKER and not HAS_CHECKER) and not (test.name in PYTORCH and not HAS_PYTORCH):
                assert doctest.DocTestRunner().run(test).failed == 0
    finally:  # what install_as_flash_attn() leaves
        for alias in {x for x in set(sys.modules) - before if x.partition(".")[0] == "flash_attn"}:
            del sys.modules[alias]


@pytest.mark.parametrize("name", PUBLIC)
def test_public_functions_have_an_example_that_runs(name):
    if PUBLIC[name] is not None:
        pytest.importorskip(PUBLIC[name])
    module = importlib.import_module(name)
    functions = [getattr(module, x) for x in module.__all__ if inspect.isfunction(getattr(module, x))]
    assert functions
    assert [f.__name__ for f in functions if ">>>" not in f.__doc__ or f.__module__ not in MODULES] == []


def test_signatures_spell_the_options_out():
    import fa2_cpu as fa2

    for name in ("attention_forward", "attention_backward"):
        ours, reference = (inspect.signature(getattr(module, name)) for module in (fa2, fa2.reference))
        assert list(ours.parameters) == list(reference.parameters)
        assert "Literal['bhsd', 'bshd', 'thd']" in str(ours)
    with pytest.raises(TypeError, match="unexpected keyword argument 'casual'.*causal"):
        fa2.attention_forward(None, None, None, casual="top_left")
