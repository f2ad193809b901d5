# SPDX-License-Identifier: Apache-2.0
"""The kernels of a training step beside attention, over arrays of any library.

f32, bf16, f16 or f64 where nothing else is said; arithmetic is in f32 or better, in f64 for f64. Rows are
the last dimension, whose elements must be contiguous. None of them is differentiable: a tensor of PyTorch that
requires grad is a TypeError where fa2_cpu.torch has the function with its derivative.
"""

from __future__ import annotations

from fa2_cpu import _core
from fa2_cpu._arrays import Array, Results, check_array, check_one_dtype, check_plain_tensor, core_array, describe
from fa2_cpu._options import integer, number


def _flat(name: str, x: Array) -> Array:
    """Indices [..., n] as one dimension."""
    check_array(name, x)
    if not hasattr(x, "reshape"):
        return x
    return x if len(describe(name, x)[1]) == 1 else x.reshape(-1)


def _rows(name: str, x: Array) -> Array:
    """An array of any number of dimensions with at most four, the last one kept."""
    _, shape = describe(name, x)
    return x if len(shape) <= 4 else x.reshape(-1, shape[-1])


def transpose_2d(x: Array) -> Array:
    """y[..., c, r] = x[..., r, c], dense. x [..., rows, cols], at least two dimensions, any dtype but bool.

    Raises:
      TypeError: what is no array on the CPU, or a dtype that does not fit; a tensor that requires grad.
      ValueError: shapes that do not fit.

    Example:
      >>> import numpy as np, fa2_cpu as fa2
      >>> fa2.transpose_2d(np.arange(6.0).reshape(2, 3)).tolist()
      [[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]
    """
    check_plain_tensor("x", x, "transpose_2d", "x.mT.contiguous()")
    dtype, shape = describe("x", x)
    if len(shape) < 2:
        raise ValueError(f"x has shape {shape}; it must be [..., rows, cols]")
    results = Results(x)
    y = results.empty((*shape[:-2], shape[-1], shape[-2]), dtype)
    _core.transpose_2d(core_array("x", x), core_array("y", y))
    return results.finish(y)


def softmax(x: Array) -> Array:
    """Softmax of each row. x [..., dim]; y has its shape and dtype.

    Raises:
      TypeError: what is no array on the CPU, or a dtype that does not fit; a tensor that requires grad.
      ValueError: shapes that do not fit.

    Example:
      >>> import numpy as np, fa2_cpu as fa2
      >>> fa2.softmax(np.zeros((1, 4), np.float32)).tolist()
      [[0.25, 0.25, 0.25, 0.25]]
    """
    check_plain_tensor("x", x, "softmax", "fa2_cpu.torch.softmax")
    dtype, shape = describe("x", x)
    results = Results(x)
    y = results.empty(shape, dtype)
    _core.softmax(core_array("x", _rows("x", x)), core_array("y", _rows("y", y)))
    return results.finish(y)


def softmax_backward(dy: Array, y: Array) -> Array:
    """dx = y · (dy − Σ y · dy) by rows. dy and y [..., dim], y = softmax(x); dx has y's shape and dtype.

    Raises:
      TypeError: what is no array on the CPU, or a dtype that does not fit; a tensor that requires grad.
      ValueError: shapes that do not fit.

    Example:
      >>> import numpy as np, fa2_cpu as fa2
      >>> fa2.softmax_backward(np.array([[1.0, 0.0]]), np.array([[0.5, 0.5]])).tolist()
      [[0.25, -0.25]]
    """
    check_plain_tensor("dy", dy, "softmax_backward", "fa2_cpu.torch.softmax")
    check_plain_tensor("y", y, "softmax_backward", "fa2_cpu.torch.softmax")
    dtype, shape = describe("y", y)
    check_one_dtype(dy=dy, y=y)
    results = Results(y)
    dx = results.empty(shape, dtype)
    _core.softmax_backward(
        core_array("dy", _rows("dy", dy)), core_array("y", _rows("y", y)), core_array("dx", _rows("dx", dx))
    )
    return results.finish(dx)


def rms_norm(x: Array, weight: Array, eps: float = 1e-5) -> Array:
    """y = x · r · weight by rows with r = 1 / √(mean(x²) + eps).

    x [..., dim]; weight [dim], dtype of x or f32; y has x's shape and dtype.

    Raises:
      TypeError: what is no array on the CPU, or a dtype that does not fit; a tensor that requires grad.
      ValueError: shapes that do not fit.

    Example:
      >>> import numpy as np, fa2_cpu as fa2
      >>> fa2.rms_norm(np.full((1, 4), 3, np.float32), np.ones(4, np.float32), eps=0.0).tolist()
      [[1.0, 1.0, 1.0, 1.0]]
    """
    check_plain_tensor("x", x, "rms_norm", "fa2_cpu.torch.rms_norm")
    check_plain_tensor("weight", weight, "rms_norm", "fa2_cpu.torch.rms_norm")
    dtype, shape = describe("x", x)
    results = Results(x)
    y = results.empty(shape, dtype)
    _core.rms_norm(
        core_array("x", _rows("x", x)), core_array("weight", weight), number("eps", eps), core_array("y", _rows("y", y))
    )
    return results.finish(y)


def rms_norm_backward(dy: Array, x: Array, weight: Array, eps: float = 1e-5) -> tuple[Array, Array]:
    """Gradients of rms_norm: dx [..., dim] in x's dtype, dweight [dim] in weight's dtype.

    Raises:
      TypeError: what is no array on the CPU, or a dtype that does not fit; a tensor that requires grad.
      ValueError: shapes that do not fit.

    Example:
      >>> import numpy as np, fa2_cpu as fa2
      >>> dx, dweight = fa2.rms_norm_backward(np.ones((1, 4)), np.full((1, 4), 3.0), np.ones(4), eps=0.0)
      >>> dx.round(6).tolist(), dweight.tolist()
      ([[0.0, 0.0, 0.0, 0.0]], [1.0, 1.0, 1.0, 1.0])
    """
    check_plain_tensor("dy", dy, "rms_norm_backward", "fa2_cpu.torch.rms_norm")
    check_plain_tensor("x", x, "rms_norm_backward", "fa2_cpu.torch.rms_norm")
    check_plain_tensor("weight", weight, "rms_norm_backward", "fa2_cpu.torch.rms_norm")
    dtype, shape = describe("x", x)
    weight_dtype, weight_shape = describe("weight", weight)
    check_one_dtype(dy=dy, x=x)
    results = Results(x)
    dx = results.empty(shape, dtype)
    dweight = results.empty(weight_shape, weight_dtype)
    _core.rms_norm_backward(
        core_array("dy", _rows("dy", dy)), core_array("x", _rows("x", x)), core_array("weight", weight),
        number("eps", eps), core_array("dx", _rows("dx", dx)), core_array("dweight", dweight),
    )  # fmt: skip
    return results.finish(dx), results.finish(dweight)


def embedding_backward(dy: Array, ids: Array, num_embeddings: int) -> Array:
    """dweight[ids[t]] += dy[t], starting from 0.

    dy [..., dim]; ids i32 or i64 with one index in [0, num_embeddings) for every row of dy; dweight
    [num_embeddings, dim] in dy's dtype.

    Raises:
      TypeError: what is no array on the CPU, or a dtype that does not fit; a tensor that requires grad.
      ValueError: shapes that do not fit, or an index out of range, by its position and value.

    Example:
      >>> import numpy as np, fa2_cpu as fa2
      >>> fa2.embedding_backward(np.ones((3, 1)), np.array([2, 0, 2]), 4)[:, 0].tolist()
      [1.0, 0.0, 2.0, 0.0]
    """
    check_plain_tensor("dy", dy, "embedding_backward", "fa2_cpu.torch.embedding")
    dtype, shape = describe("dy", dy)
    if not shape:
        raise ValueError("dy has no dimension; it must be [..., dim]")
    num_embeddings = integer("num_embeddings", num_embeddings)
    if num_embeddings < 0:
        raise ValueError(f"num_embeddings is {num_embeddings}; it must be at least 0")
    results = Results(dy)
    dweight = results.empty((num_embeddings, shape[-1]), dtype)
    _core.embedding_backward(
        core_array("dy", _rows("dy", dy)), core_array("ids", _flat("ids", ids)), core_array("dweight", dweight)
    )
    return results.finish(dweight)


def cross_entropy(logits: Array, targets: Array, ignore_index: int = -100) -> tuple[Array, Array]:
    """Mean of −log softmax(logits)[target] over the positions that count, and its gradient, in one pass.

    logits [..., vocab]; targets i32 or i64, one for every row, in [0, vocab) or ignore_index. Returns
    loss, f32 of no dimension, and dlogits with the shape and dtype of logits (0 where ignored). Where no position
    counts, both are 0.

    Raises:
      TypeError: what is no array on the CPU, or a dtype that does not fit; a tensor that requires grad.
      ValueError: shapes that do not fit, or a target out of range, by its position and value.

    Example:
      >>> import numpy as np, fa2_cpu as fa2
      >>> loss, dlogits = fa2.cross_entropy(np.zeros((2, 4), np.float32), np.array([1, -100]))
      >>> round(float(loss), 4), dlogits[0].tolist()
      (1.3863, [0.25, -0.75, 0.25, 0.25])
    """
    check_plain_tensor("logits", logits, "cross_entropy", "fa2_cpu.torch.cross_entropy")
    dtype, shape = describe("logits", logits)
    results = Results(logits)
    loss = results.empty((1,), "float32")
    dlogits = results.empty(shape, dtype)
    _core.cross_entropy(
        core_array("logits", _rows("logits", logits)), core_array("targets", _flat("targets", targets)),
        integer("ignore_index", ignore_index), core_array("loss", loss), core_array("dlogits", _rows("dlogits", dlogits)),
    )  # fmt: skip
    return results.finish(loss.reshape(())), results.finish(dlogits)


def causal_attention_backward(
    dout: Array, q: Array, k: Array, v: Array, num_heads: int, num_kv_heads: int
) -> tuple[Array, Array, Array]:
    """Gradients of causal self-attention (top-left, scale 1/√head_dim) from its inputs alone.

    The softmax is computed again inside. q and dout [seq, num_heads · head_dim] or with a leading
    batch; k and v [seq, num_kv_heads · head_dim]; f32, bf16, f16 or f64. Returns dq, dk, dv in the
    inputs' shapes and dtype.

    Raises:
      TypeError: what is no array on the CPU, or a dtype that does not fit; a tensor that requires grad.
      ValueError: shapes that do not fit.

    Example:
      >>> import numpy as np, fa2_cpu as fa2
      >>> q, k, v = np.random.default_rng(0).standard_normal((3, 5, 2 * 4))
      >>> dq, dk, dv = fa2.causal_attention_backward(np.ones((5, 8)), q, k, v, num_heads=2, num_kv_heads=2)
      >>> dv.sum(0).round(6).tolist()  # each query's probabilities sum to 1
      [5.0, 5.0, 5.0, 5.0, 5.0, 5.0, 5.0, 5.0]
    """
    for name, x in (("dout", dout), ("q", q), ("k", k), ("v", v)):
        check_plain_tensor(name, x, "causal_attention_backward", "fa2_cpu.torch.causal_attention")
    check_one_dtype(q=q, k=k, v=v, dout=dout)
    results = Results(q)
    grads = []
    for name, x in (("q", q), ("k", k), ("v", v)):
        dtype, shape = describe(name, x)
        grads.append(results.empty(shape, dtype))
    _core.causal_attention_backward(
        core_array("dout", dout), core_array("q", q), core_array("k", k), core_array("v", v),
        integer("num_heads", num_heads), integer("num_kv_heads", num_kv_heads),
        *(core_array(name, x) for name, x in zip(("dq", "dk", "dv"), grads)),
    )  # fmt: skip
    return tuple(results.finish(x) for x in grads)
