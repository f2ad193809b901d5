# SPDX-License-Identifier: Apache-2.0
"""FlexAttention: PyTorch's flex_attention and create_block_mask for CPU tensors, with a gradient.

    _attention        the function: checks, and the way that a call takes
    _create           create_block_mask; _table finds the blocks that a mask leaves visible
    _of_pytorch       PyTorch's BlockMask as _block_lists has it
    _graph            score_mod recorded; _forms: what of it the kernels do
    _fused            the kernels' options; _terms: tensors of them, _lines: those of q - k
    _bias_chunks      a bias of N² elements, never whole
    _by_blocks        any other score_mod; _blocks: its scores; _second: second derivatives of these and of _bias_chunks
    _replace          PyTorch's functions sent here; _code and _original: how
"""
