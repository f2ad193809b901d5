# SPDX-License-Identifier: Apache-2.0
"""The float64 oracle: attention by plain loops, to check any kernel against.

The functions take the arguments of fa2_cpu.attention_forward and fa2_cpu.attention_backward and compute in
double whatever the inputs are; every result is float64 unless grad_dtype says otherwise. Slow, and
O(Nq · Nk) memory a head. precision and num_threads have no effect.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fa2_cpu._arrays import Array
from fa2_cpu._attention import Gradients, backward, check_plain_inputs, forward
from fa2_cpu._options import BACKWARD_DEFAULTS, DEFAULTS, AttentionOptions, BackwardOptions, with_options

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["attention_backward", "attention_forward"]


@with_options(AttentionOptions, DEFAULTS)
def attention_forward(q: Array, k: Array, v: Array, **options: Unpack[AttentionOptions]) -> tuple[Any, Any]:
    """fa2_cpu.attention_forward in float64: (out, lse), both float64. Raises what that raises, also of tensors that require grad.

    Example:
      >>> import numpy as np, fa2_cpu as fa2
      >>> q = np.ones((1, 1, 3, 4), np.float32)
      >>> out, lse = fa2.reference.attention_forward(q, q, q)
      >>> out.dtype, lse.round(6).tolist()
      (dtype('float64'), [[[3.098612, 3.098612, 3.098612]]])
    """
    check_plain_inputs("reference.attention_forward", options, q=q, k=k, v=v)
    return forward(q, k, v, dict(options), reference=True)


@with_options(BackwardOptions, BACKWARD_DEFAULTS)
def attention_backward(
    dout: Array, q: Array, k: Array, v: Array, out: Array, lse: Array, **options: Unpack[BackwardOptions]
) -> Gradients:
    """fa2_cpu.attention_backward in float64: gradients in float64, or in grad_dtype. Raises what that raises.

    Example:
      >>> import numpy as np, fa2_cpu as fa2
      >>> q = np.ones((1, 1, 3, 4), np.float32)
      >>> out, lse = fa2.reference.attention_forward(q, q, q)
      >>> fa2.reference.attention_backward(q, q, q, q, out, lse).dv[0, 0, :, 0].round(6).tolist()
      [1.0, 1.0, 1.0]
    """
    check_plain_inputs("reference.attention_backward", options, dout=dout, q=q, k=k, v=v, dlse=options.get("dlse"))
    return backward(dout, q, k, v, out, lse, dict(options), reference=True)
