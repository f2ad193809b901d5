# SPDX-License-Identifier: Apache-2.0
"""FlashAttention-2 training kernels for CPUs.

    import fa2_cpu as fa2
    out, lse = fa2.attention_forward(q, k, v, causal="top_left")
    grads = fa2.attention_backward(dout, q, k, v, out, lse, causal="top_left")

Arrays are those of NumPy, ml_dtypes, PyTorch, JAX or anything with __dlpack__. The parts for one
library are imported by name: fa2_cpu.torch, fa2_cpu.flash_attn, fa2_cpu.hf, fa2_cpu.jax.
"""

from __future__ import annotations

import functools as _functools
from collections.abc import Sequence
from typing import Any

import numpy as _np

from fa2_cpu import _core, reference
from fa2_cpu._attention import Gradients, attention_backward, attention_forward
from fa2_cpu._block_mask import BlockMask
from fa2_cpu._core import __version__
from fa2_cpu._training_ops import (
    causal_attention_backward,
    cross_entropy,
    embedding_backward,
    rms_norm,
    rms_norm_backward,
    softmax,
    softmax_backward,
    transpose_2d,
)
from fa2_cpu._verify import Report, VerificationError, verify

__all__ = [
    "BlockMask",
    "Gradients",
    "Report",
    "VerificationError",
    "__version__",
    "attention_backward",
    "attention_forward",
    "capture",
    "causal_attention_backward",
    "cross_entropy",
    "embedding_backward",
    "info",
    "philox_keep_mask",
    "reference",
    "rms_norm",
    "rms_norm_backward",
    "softmax",
    "softmax_backward",
    "transpose_2d",
    "verify",
]


def philox_keep_mask(shape: Sequence[int], dropout_p: float, seed: int, offset: int) -> _np.ndarray:
    """The dropout mask that attention uses: True where an element of P is kept.

    Args:
      shape: [B, Hq, Nq, Nk], or fewer dimensions, taken as leading ones.
      dropout_p: probability of dropping, in [0, 1].
      seed, offset: philox_seed and philox_offset of attention_forward. Element n in row-major order
        is kept iff x · 2⁻³² + 2⁻³³ > dropout_p (in f32), where x is 32-bit output offset + n of
        Philox4x32-10 (Salmon et al. 2011) with key seed.

    Returns:
      A bool NumPy array of that shape.

    Raises:
      TypeError, ValueError: a shape, a probability or a number out of range.

    Example:
      >>> import fa2_cpu as fa2
      >>> fa2.philox_keep_mask((1, 1, 2, 3), 0.5, seed=7, offset=0).shape
      (1, 1, 2, 3)
    """
    keep = _np.empty(tuple(shape), dtype=_np.bool_)
    _core.philox_keep_mask(keep, float(dropout_p), seed, offset)
    return keep


@_functools.cache
def _peak() -> float | None:
    return _core.measure_peak()


def info() -> dict[str, Any]:
    """What a call computes with.

    version; target (instruction set in use, e.g. "avx3"); engine (matrix engine of bf16 inputs in
    precision "fast"); threads; pool (whose: "tbb" or "openmp", as FA2_POOL says; PyTorch's
    operators run on "openmp" where it says nothing); peak (floating-point operations per second
    that the arithmetic unit behind engine reaches at most on that many threads, measured by the
    first call in some 60 ms; None where this build cannot measure it);
    targets and engines (all that this build and this CPU have, best first).

    Example:
      >>> import fa2_cpu as fa2
      >>> sorted(fa2.info())
      ['engine', 'engines', 'peak', 'pool', 'target', 'targets', 'threads', 'version']
    """
    return {"version": __version__, **_core.info(), "peak": _peak()}


def capture(path: Any, **options: Any) -> Any:
    """A context manager that records what attention gets and returns in a training run, as cases for verify.

        with fa2_cpu.capture("run.safetensors", calls=4):
            loss.backward()

    Args:
      path: the safetensors file to write when the block ends.
      calls: how many calls to record, 8 unless told.
      function: (module, name) of a function of q, k, v; PyTorch's and flash_attn's without it.
      options: of that function, as verify takes them.
    Needs PyTorch.

    Raises:
      ImportError: PyTorch is not installed.
      TypeError: an argument that it does not have.
      AttributeError: function names what its module does not have.

    Example:
      >>> import os, tempfile, torch, fa2_cpu as fa2
      >>> q, k, v = (torch.randn(1, 2, 8, 16, requires_grad=True) for _ in range(3))
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     path = os.path.join(folder, "run.safetensors")
      ...     with fa2.capture(path, calls=1):
      ...         torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).sum().backward()
      ...     fa2.verify(path).passed
      True
    """
    from fa2_cpu._capture import capture as start

    return start(path, **options)
