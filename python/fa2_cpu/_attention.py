# SPDX-License-Identifier: Apache-2.0
"""attention_forward and attention_backward over arrays of any library."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from fa2_cpu import _core
from fa2_cpu._arrays import (
    Array, ArrayT, Results, check_array, check_one_dtype, check_plain_tensor, core_array, describe, dtype_name,
)  # fmt: skip
from fa2_cpu._options import (
    BACKWARD_DEFAULTS, DEFAULTS, AttentionOptions, BackwardOptions, core_options, fill, with_options,
)  # fmt: skip

if TYPE_CHECKING:
    from typing_extensions import Unpack


class Gradients(NamedTuple):
    """Gradients of attention; None for what was not asked for.

    dq, dk, dv have the shapes of q, k, v; dbias, dalibi_slopes and dsinks those of bias,
    alibi_slopes and sinks.
    """

    dq: Array
    dk: Array
    dv: Array
    dbias: Array | None
    dalibi_slopes: Array | None
    dsinks: Array | None


_FLOATS = ("float32", "bfloat16", "float16", "float64")
_RANKS = {"bhsd": (4, "[batch, heads, sequence, head_dim]"),
          "bshd": (4, "[batch, sequence, heads, head_dim]"),
          "thd": (3, "[total, heads, head_dim]")}  # fmt: skip


def _describe_operand(name: str, x: Array, layout: str) -> tuple[str, tuple[int, ...]]:
    """dtype and shape, checked as far as the shapes of the results follow from them."""
    if layout not in _RANKS:
        raise ValueError(f'layout is "{layout}"; it must be "bhsd", "bshd" or "thd"')
    dtype, shape = describe(name, x)
    if dtype not in _FLOATS:
        hint = "; view bf16 data as ml_dtypes.bfloat16" if dtype == "uint16" else ""
        raise TypeError(f"{name} is {dtype}; it must be one of {', '.join(_FLOATS)}{hint}")
    rank, wanted = _RANKS[layout]
    if len(shape) != rank:
        raise ValueError(f"{name} has shape {shape}; it must be {wanted} (layout {layout})")
    return dtype, shape


def _lse_shape(q_shape: tuple[int, ...], layout: str) -> tuple[int, ...]:
    if layout == "thd":
        total, heads, _ = q_shape
        return heads, total
    if layout == "bshd":
        batch, sequence, heads, _ = q_shape
        return batch, heads, sequence
    return q_shape[:-1]


def forward(q: Array, k: Array, v: Array, given: dict[str, Any], *, reference: bool) -> tuple[Any, Any]:
    options = core_options(fill("attention_forward", given, DEFAULTS))
    layout = options["layout"]
    dtype, q_shape = _describe_operand("q", q, layout)
    check_array("k", k)
    _, v_shape = _describe_operand("v", v, layout)
    check_one_dtype(q=q, k=k, v=v)
    results = Results(q)
    double = reference or dtype == "float64"
    out = results.empty((*q_shape[:-1], v_shape[-1]), "float64" if reference else dtype)
    lse = results.empty(_lse_shape(q_shape, layout), "float64" if double else "float32")
    _core.attention_forward(
        core_array("q", q), core_array("k", k), core_array("v", v),
        core_array("out", out), core_array("lse", lse), reference=reference, **options,
    )  # fmt: skip
    return results.finish(out), results.finish(lse)


def backward(
    dout: Array, q: Array, k: Array, v: Array, out: Array, lse: Array, given: dict[str, Any], *, reference: bool
) -> Gradients:
    filled = fill("attention_backward", given, BACKWARD_DEFAULTS)
    options = core_options(filled)
    layout, want_dbias, grad_dtype = options["layout"], filled["want_dbias"], filled["grad_dtype"]
    for name, x in (("dout", dout), ("out", out), ("lse", lse)):
        check_array(name, x)
    shapes = {}
    for name, x in (("q", q), ("k", k), ("v", v)):
        dtype, shapes[name] = _describe_operand(name, x, layout)
    check_one_dtype(q=q, k=k, v=v)
    if want_dbias and filled["bias"] is None:
        raise ValueError("want_dbias is True, but bias is None; a bias must be given to have a gradient")
    double = reference or dtype == "float64"
    if grad_dtype is not None:
        dtype = dtype_name(grad_dtype)
    elif reference:
        dtype = "float64"
    if dtype not in _FLOATS:
        raise TypeError(f"grad_dtype is {grad_dtype!r}; it must be one of {', '.join(_FLOATS)}")
    results = Results(q)
    grads = [results.empty(shapes[name], dtype) for name in ("q", "k", "v")]
    dbias = dalibi_slopes = dsinks = None
    if want_dbias:
        bias_dtype, bias_shape = describe("bias", filled["bias"])
        if bias_dtype not in _FLOATS:
            raise TypeError(f"bias is {bias_dtype} and has no gradient; want_dbias must be False")
        # In f64 unless the inputs are narrower, then in the bias's dtype, or f32 where that is wider.
        narrow = "float32" if grad_dtype is not None or bias_dtype == "float64" else bias_dtype
        dbias = results.empty(bias_shape, "float64" if double else narrow)
    vector_dtype = "float64" if reference else "float32"
    if filled["alibi_slopes"] is not None:
        dalibi_slopes = results.empty(describe("alibi_slopes", filled["alibi_slopes"])[1], vector_dtype)
    if filled["sinks"] is not None:
        dsinks = results.empty(describe("sinks", filled["sinks"])[1], vector_dtype)
    grads += [dbias, dalibi_slopes, dsinks]
    names = ("dq", "dk", "dv", "dbias", "dalibi_slopes", "dsinks")
    _core.attention_backward(
        core_array("dout", dout), core_array("q", q), core_array("k", k), core_array("v", v),
        core_array("out", out), core_array("lse", lse), core_array("dlse", filled["dlse"]), None,
        *(core_array(name, x) for name, x in zip(names, grads)), reference=reference, **options,
    )  # fmt: skip
    return Gradients(*(results.finish(x) for x in grads))


def check_plain_inputs(function: str, options: Any, **tensors: Any) -> None:
    """TypeError for an input through which PyTorch would differentiate."""
    for name in ("bias", "alibi_slopes", "sinks"):
        tensors[name] = options.get(name)
    for name, x in tensors.items():
        check_plain_tensor(name, x, function, "fa2_cpu.torch.attention")


@with_options(AttentionOptions, DEFAULTS)
def attention_forward(q: ArrayT, k: Array, v: Array, **options: Unpack[AttentionOptions]) -> tuple[ArrayT, ArrayT]:
    """Scaled dot-product attention (FlashAttention-2): out = softmax(mask(scale · q kᵀ)) v.

    Arrays are those of NumPy (bf16 by ml_dtypes), PyTorch, JAX or anything with __dlpack__, on the
    CPU, with any strides; they are not copied. Results come back in the library of q.

    Args:
      q: [B, Hq, Nq, D] in layout "bhsd", [B, Nq, Hq, D] in "bshd", [total_q, Hq, D] in "thd"; f32,
        bf16, f16 or f64.
      k: [B, Hkv, Nk, D] (or the other layouts), dtype of q; Hq is a multiple of Hkv.
      v: [B, Hkv, Nk, Dv], dtype of q.
      layout: "bhsd", "bshd" or "thd".
      scale: factor of the scores; None is 1/√D.
      causal: None, "top_left" (query i sees keys j ≤ i) or "bottom_right" (j ≤ i + Nk − Nq).
      window: (left, right): query i sees keys i' − left … i' + right around its diagonal i', which is
        i for "top_left" and i + Nk − Nq otherwise; −1 is unbounded.
      bias: added to the scores, or bool (False masks); [B or 1, Hq or 1, Nq or 1, Nk or 1], leading
        dimensions may be left out.
      block_mask: a BlockMask: blocks of queries x keys that it does not list are hidden and cost
        nothing.
      softcap: c > 0 replaces the scores by c · tanh(scores / c); 0 is none.
      alibi_slopes: f32 [Hq] or [B, Hq]: adds −slope · |i + Nk − Nq − j|.
      sinks: f32 [Hq]: exp(sink) joins each softmax sum, with no value.
      dropout_p, philox_seed, philox_offset: probability of dropping, and where in the random stream
        of Philox4x32-10 the mask starts (see philox_keep_mask).
      cu_seqlens_q, cu_seqlens_k: i32 or i64 prefix sums [sequences + 1] of lengths, for "thd".
      precision: "fast", "high" or "exact" (see docs/python.md).
      num_threads: None is FA2_NUM_THREADS or all cores.

    Returns:
      out, in the layout of q with Dv columns and dtype of q, and lse, f32 (f64 for f64)
      [B, Hq, Nq], or [Hq, total_q] in "thd": the natural logsumexp of the masked scores.

    Raises:
      ValueError: arguments that do not fit each other. TypeError: no array, an element type that
      does not fit, or an array that is not on the CPU.

    Example:
      >>> import numpy as np, fa2_cpu as fa2
      >>> q, k, v = np.random.default_rng(0).standard_normal((3, 2, 4, 5, 8), dtype=np.float32)
      >>> out, lse = fa2.attention_forward(q, k, v, causal="top_left")
      >>> out.shape, lse.shape
      ((2, 4, 5, 8), (2, 4, 5))
      >>> bool(np.allclose(out[:, :, 0], v[:, :, 0]))
      True
    """
    check_plain_inputs("attention_forward", options, q=q, k=k, v=v)
    return forward(q, k, v, dict(options), reference=False)


@with_options(BackwardOptions, BACKWARD_DEFAULTS)
def attention_backward(
    dout: Array, q: Array, k: Array, v: Array, out: Array, lse: Array, **options: Unpack[BackwardOptions]
) -> Gradients:
    """Gradients of attention_forward, called with the same arguments.

    Args:
      dout: gradient of out, shape and dtype of out.
      q, k, v: the inputs of attention_forward.
      out, lse: its results.
      dlse: gradient of lse, shape of lse; None is 0.
      grad_dtype: dtype of dq, dk and dv: that of the inputs (None), or f32, which skips the last
        rounding, also that of dbias. f64 inputs always have an f64 dbias.
      want_dbias: also the gradient of bias, summed over the dimensions that bias broadcasts.
      The rest: as for attention_forward.

    Returns:
      Gradients(dq, dk, dv, dbias, dalibi_slopes, dsinks): dbias is None unless wanted,
      dalibi_slopes and dsinks (f32) are None where slopes or sinks are not given.

    Raises:
      ValueError, TypeError: as attention_forward.

    Tensors of PyTorch that require grad are refused while it records: the gradients would have none of their own.

    Example:
      >>> import numpy as np, fa2_cpu as fa2
      >>> q, k, v = np.random.default_rng(0).standard_normal((3, 2, 4, 5, 8), dtype=np.float32)
      >>> out, lse = fa2.attention_forward(q, k, v)
      >>> grads = fa2.attention_backward(np.ones_like(out), q, k, v, out, lse)
      >>> grads.dq.shape, grads.dbias is None
      ((2, 4, 5, 8), True)
    """
    check_plain_inputs("attention_backward", options, dout=dout, q=q, k=k, v=v, dlse=options.get("dlse"))
    return backward(dout, q, k, v, out, lse, dict(options), reference=False)
