# SPDX-License-Identifier: Apache-2.0
"""For pytest: an attention function of your own, run on inputs that find mistakes, and judged.

    from fa2_cpu.testing import assert_attention_gradients

    def test_my_kernel():
        assert_attention_gradients(my_attention, (2, 8, 2, 100, 130, 64), causal="bottom_right", device="cuda")
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from fa2_cpu._verify import Report, verify

__all__ = ["INPUTS", "assert_attention_gradients", "make_inputs"]

INPUTS = ("gaussian", "outliers", "peaked", "long-tail", "adversarial")


def make_inputs(
    shape: Sequence[int], inputs: str = "gaussian", seed: int = 0, layout: str = "bhsd"
) -> dict[str, np.ndarray]:
    """q, k, v and dout in float32.

    Args:
      shape: (B, H, Hkv, Nq, Nk, D, Dv); Dv may be left out, four numbers are B, H, N, D.
      inputs: "gaussian"; "outliers", a few channels 50 times larger, as activations have; "peaked", rows of P near
        one-hot; "long-tail", Student's t; "adversarial", sizes and means that differ by head, batch and row.

    Raises:
      ValueError: a shape of other numbers, or a kind of inputs that there is not.

    Example:
      >>> from fa2_cpu.testing import make_inputs
      >>> {name: x.shape for name, x in make_inputs((1, 4, 2, 5, 7, 16)).items()}
      {'q': (1, 4, 5, 16), 'k': (1, 2, 7, 16), 'v': (1, 2, 7, 16), 'dout': (1, 4, 5, 16)}
    """
    sizes = tuple(int(n) for n in shape)
    if len(sizes) == 4:
        sizes = (sizes[0], sizes[1], sizes[1], sizes[2], sizes[2], sizes[3], sizes[3])
    elif len(sizes) == 6:
        sizes = (*sizes, sizes[-1])
    if len(sizes) != 7 or min(sizes) < 1:
        raise ValueError(f"shape is {tuple(shape)}, it must be (B, H, Hkv, Nq, Nk, D[, Dv]) or (B, H, N, D)")
    batch, heads, kv_heads, nq, nk, depth, value_depth = sizes
    if inputs not in INPUTS:
        raise ValueError(f"inputs is {inputs!r}, it must be one of {', '.join(INPUTS)}")
    rng = np.random.default_rng(seed)

    def draw(heads: int, rows: int, depth: int, side: int | None) -> np.ndarray:
        size = (batch, heads, rows, depth)
        x = rng.standard_t(3, size) if inputs == "long-tail" else rng.standard_normal(size)
        if inputs == "peaked" and side is not None:
            x *= 3
        if inputs == "outliers" and side is not None:
            for n in range(max(2, depth // 32)):
                if n % 2 == side:
                    x[..., (n * 37 + 5) % depth] *= 50
        if inputs == "adversarial":
            by_head = (np.arange(heads)[:, None] * 3 + np.arange(batch)[None, :]).T % 4
            x *= (1 + 0.25 * by_head)[..., None, None]
            x += (0.125 * (np.arange(rows) % 5) - 0.25)[:, None]
        x = x.astype(np.float32)
        return x if layout == "bhsd" else np.ascontiguousarray(x.transpose(0, 2, 1, 3))

    return {
        "q": draw(heads, nq, depth, 0),
        "k": draw(kv_heads, nk, depth, 1),
        "v": draw(kv_heads, nk, value_depth, None),
        "dout": draw(heads, nq, value_depth, None),
    }


def _run_torch(fn: Callable, arrays: dict[str, np.ndarray], dtype: Any, device: Any) -> dict[str, Any]:
    import torch

    if isinstance(dtype, str):
        dtype = getattr(torch, dtype)
    tensors = {name: torch.from_numpy(x).to(device=device, dtype=dtype) for name, x in arrays.items()}
    q, k, v = (tensors[name].requires_grad_() for name in "qkv")
    result = fn(q, k, v)
    out, lse = result if isinstance(result, tuple) else (result, None)
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), tensors["dout"])
    return {**tensors, "out": out, "lse": lse, "dq": dq, "dk": dk, "dv": dv}


def _run_jax(fn: Callable, arrays: dict[str, np.ndarray], dtype: Any) -> dict[str, Any]:
    import jax

    tensors = {name: jax.numpy.asarray(x).astype(dtype) for name, x in arrays.items()}
    result, pullback = jax.vjp(fn, *(tensors[name] for name in "qkv"))
    if isinstance(result, tuple):
        out, lse = result
        dq, dk, dv = pullback((tensors["dout"], jax.numpy.zeros_like(lse)))
    else:
        out, lse = result, None
        dq, dk, dv = pullback(tensors["dout"])
    return {**tensors, "out": out, "lse": lse, "dq": dq, "dk": dk, "dv": dv}


def assert_attention_gradients(
    fn: Callable,
    shape: Sequence[int],
    *,
    dtype: Any = "bfloat16",
    inputs: str | Sequence[str] = INPUTS,
    framework: str = "torch",
    device: Any = "cpu",
    seed: int = 0,
    num_threads: int | None = None,
    **options: Any,
) -> list[Report]:
    """Runs fn(q, k, v) and its gradients on each kind of inputs and judges them.

    Args:
      fn: gives out, or (out, lse), of q, k, v; differentiable by its framework. It closes over its own options, which
        must be those given here.
      shape: (B, H, Hkv, Nq, Nk, D[, Dv]) or (B, H, N, D).
      dtype: of the tensors, by name or the framework's own.
      framework: "torch" (Triton kernels too) or "jax".
      **options: those of fa2_cpu.verify.

    Returns:
      The reports, one for each kind of inputs.

    Raises:
      VerificationError: an AssertionError, with the first report that failed.
      ValueError: a shape, a framework or a kind of inputs that there is not.

    Example:
      >>> import torch
      >>> from fa2_cpu.testing import assert_attention_gradients
      >>> attention = torch.nn.functional.scaled_dot_product_attention
      >>> reports = assert_attention_gradients(attention, (1, 2, 8, 16), dtype="float32", inputs="peaked")
      >>> reports[0].passed
      True
    """
    if framework not in ("torch", "jax"):
        raise ValueError(f"framework is {framework!r}, it must be 'torch' or 'jax'")
    reports = []
    for kind in (inputs,) if isinstance(inputs, str) else inputs:
        arrays = make_inputs(shape, kind, seed, options.get("layout", "bhsd"))
        if framework == "jax":
            tensors = _run_jax(fn, arrays, dtype)
        else:
            tensors = _run_torch(fn, arrays, dtype, device)
        named = {f"{kind}/{name}": x for name, x in tensors.items() if x is not None}
        report = verify(named, num_threads=num_threads, **options)
        report.raise_if_failed()
        reports.append(report)
    return reports
