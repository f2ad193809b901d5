# SPDX-License-Identifier: Apache-2.0
"""fa2_cpu.torch's operators as PyTorch's own tools see them: opcheck, gradcheck, compile, autocast, generator."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import fa2_cpu.torch  # noqa: E402
from conftest import BOUNDS, relative_l2  # noqa: E402
from fa2_cpu.torch import scaled_dot_product_attention  # noqa: E402

# The oracle, also of tensors that require grad.
oracle_forward = torch.no_grad()(fa2_cpu.reference.attention_forward)
oracle_backward = torch.no_grad()(fa2_cpu.reference.attention_backward)


def _tensors(dtype=torch.float32, n=19, m=23, heads=4, kv_heads=4, batch=2, dim=16, value_dim=8, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = ((batch, heads, n, dim), (batch, kv_heads, m, dim), (batch, kv_heads, m, value_dim))
    return [torch.randn(s, dtype=torch.float64, generator=generator).to(dtype).requires_grad_() for s in shapes]


def _op_arguments(q, k, v, **changes):
    names = ("bias alibi_slopes sinks cu_seqlens_q cu_seqlens_k philox layout scale causal window_left "
             "window_right softcap dropout_p max_seqlen_q max_seqlen_k precision").split()  # fmt: skip
    values = dict(zip(names, [None] * 6 + ["bhsd", None, "", -1, -1, 0.0, 0.0, 0, 0, "exact"]))
    values.update(changes)
    return (q, k, v, *values.values())


CASES = {
    "plain": {},
    "causal window": dict(causal="top_left", window_left=5),
    "bias": dict(bias=torch.randn(1, 4, 19, 23, dtype=torch.float64, requires_grad=True)),
    "mask": dict(bias=torch.rand(2, 1, 1, 23) > 0.3),
    "alibi sinks": dict(
        alibi_slopes=torch.rand(4, requires_grad=True), sinks=torch.randn(4, requires_grad=True)
    ),
    "dropout": dict(dropout_p=0.2, philox=torch.tensor([7, 8])),
    "softcap scale": dict(softcap=2.0, scale=0.4),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_opcheck(case, dtype):
    torch.library.opcheck(torch.ops.fa2.attention.default, _op_arguments(*_tensors(dtype), **case))


def test_opcheck_layouts():
    q, k, v = _tensors()
    transposed = [x.detach().transpose(1, 2).contiguous().requires_grad_() for x in (q, k, v)]
    torch.library.opcheck(torch.ops.fa2.attention.default, _op_arguments(*transposed, layout="bshd"))
    views = [x.detach().transpose(1, 2).requires_grad_() for x in transposed]
    torch.library.opcheck(torch.ops.fa2.attention.default, _op_arguments(*views))
    packed = [x.detach()[0].requires_grad_() for x in transposed]
    starts = dict(cu_seqlens_q=torch.tensor([0, 4, 19]), cu_seqlens_k=torch.tensor([0, 9, 23]))
    torch.library.opcheck(torch.ops.fa2.attention.default, _op_arguments(*packed, layout="thd", **starts))


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if "alibi_slopes" not in case])
def test_gradcheck(name):
    q, k, v = _tensors(torch.float64, n=5, m=7, batch=1, dim=3, value_dim=2, kv_heads=2)
    case = dict(CASES[name])
    if "bias" in case:
        rows = 1 if case["bias"].shape[2] == 1 else 5
        case["bias"] = case["bias"][:1, :, :rows, :7].detach().clone().requires_grad_(case["bias"].requires_grad)

    def function(q, k, v, bias):
        return torch.ops.fa2.attention(*_op_arguments(q, k, v, **{**case, "bias": bias}))

    assert torch.autograd.gradcheck(function, (q, k, v, case.get("bias")))


def test_gradient_of_slopes_and_sinks():
    """f32 vectors: finite differences in f64 inputs are too coarse, the oracle is not."""
    q, k, v = _tensors(torch.float32)
    slopes, sinks = torch.rand(4, requires_grad=True), torch.randn(4, requires_grad=True)
    out, lse = fa2_cpu.torch.attention(q, k, v, alibi_slopes=slopes, sinks=sinks)
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    grads = torch.autograd.grad((out, lse), (q, k, v, slopes, sinks), (dout, dlse))
    options = dict(alibi_slopes=slopes, sinks=sinks)
    expected = oracle_backward(dout, q, k, v, out, lse, dlse=dlse, **options)
    for grad, right in zip(grads, (*expected[:3], expected.dalibi_slopes, expected.dsinks)):
        assert relative_l2(grad, right) <= 3e-6


@pytest.mark.parametrize("bias_dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_bias_of_another_dtype(dtype, bias_dtype):
    q, k, v = _tensors(dtype)
    bias = torch.randn(1, 4, 19, 23).to(bias_dtype).requires_grad_()
    out, lse = fa2_cpu.torch.attention(q, k, v, bias=bias)
    dout = torch.randn_like(out)
    (grad,) = torch.autograd.grad(out, bias, dout)
    expected = oracle_backward(dout, q, k, v, out, lse, bias=bias, want_dbias=True).dbias
    bound = max(BOUNDS[str(kind).removeprefix("torch.")] for kind in (dtype, bias_dtype))
    assert grad.dtype == bias_dtype and relative_l2(grad.double(), expected) <= bound


def test_partial_gradients():
    """Only what requires a gradient gets one, and the others change nothing."""
    q, k, v = _tensors()
    everything = torch.autograd.grad(scaled_dot_product_attention(q, k, v).square().sum(), (q, k, v))
    for i, name in enumerate("qkv"):
        tensors = [x.detach().requires_grad_(j == i) for j, x in enumerate((q, k, v))]
        scaled_dot_product_attention(*tensors).square().sum().backward()
        assert torch.equal(tensors[i].grad, everything[i]), name


@pytest.mark.parametrize("dynamic", [False, True])
def test_compile_without_graph_breaks(dynamic):
    weight = torch.randn(16, 16, requires_grad=True)

    def step(q, k, v, mask):
        out = scaled_dot_product_attention(q @ weight, k, v, attn_mask=mask)
        return out.square().sum() + scaled_dot_product_attention(q, k, v, is_causal=True).sum()

    compiled = torch.compile(step, fullgraph=True, dynamic=dynamic)
    for n in (19, 31):
        q, k, v = _tensors(n=n)
        mask = torch.randn(n, 23, requires_grad=True)
        inputs = (q, k, v, mask, weight)
        expected = torch.autograd.grad(step(q, k, v, mask), inputs)
        for a, b in zip(torch.autograd.grad(compiled(q, k, v, mask), inputs), expected):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_dropout_follows_the_generator():
    q, k, v = _tensors()
    torch.manual_seed(11)
    first = scaled_dot_product_attention(q, k, v, dropout_p=0.5)
    second = scaled_dot_product_attention(q, k, v, dropout_p=0.5)
    torch.manual_seed(11)
    again = scaled_dot_product_attention(q, k, v, dropout_p=0.5)
    assert torch.equal(first, again) and not torch.equal(first, second)
    # The mask is the same whatever q, k, v hold: with v the identity, out shows it.
    masks = []
    for scale in (1.0, 3.0):
        torch.manual_seed(12)
        out = scaled_dot_product_attention(q * scale, k, torch.eye(23).expand(2, 4, 23, 23), dropout_p=0.5)
        masks.append(out != 0)
    assert torch.equal(*masks) and 0.4 < masks[0].float().mean() < 0.6
    state = torch.get_rng_state()
    scaled_dot_product_attention(q, k, v)
    assert torch.equal(state, torch.get_rng_state()), "without dropout nothing is drawn"


def test_checkpoint_reproduces_dropout():
    from torch.utils.checkpoint import checkpoint

    q, k, v = _tensors()
    grads = []
    for use_checkpoint in (False, True):
        torch.manual_seed(3)
        call = lambda *x: scaled_dot_product_attention(*x, dropout_p=0.3)  # noqa: E731
        out = checkpoint(call, q, k, v, use_reentrant=False) if use_checkpoint else call(q, k, v)
        grads.append(torch.autograd.grad(out.square().sum(), (q, k, v)))
    for a, b in zip(*grads):
        assert torch.equal(a, b)


def test_autocast():
    q, k, v = _tensors()
    with torch.autocast("cpu", torch.bfloat16):
        out = scaled_dot_product_attention(q, k, v)
        (out.float().square().sum()).backward()
    assert out.dtype == torch.bfloat16 and q.grad.dtype == torch.float32
    expected = scaled_dot_product_attention(*(x.bfloat16() for x in (q, k, v)))
    assert torch.equal(out, expected)


def test_matmul_precision():
    """f32 is exact at "highest"; the other settings allow `high`."""
    from fa2_cpu.torch._compute import resolve_precision

    before = torch.get_float32_matmul_precision()
    try:
        for setting, precision, bound in (("highest", "exact", 3e-6), ("high", "high", 1.5e-5), ("medium", "high", 1.5e-5)):
            torch.set_float32_matmul_precision(setting)
            assert resolve_precision("torch", torch.float32) == precision
            assert resolve_precision("torch", torch.bfloat16) == "fast"
            q, k, v = _tensors(n=65, m=65)
            out = scaled_dot_product_attention(q, k, v)
            assert relative_l2(out.detach(), oracle_forward(q, k, v)[0]) <= bound
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_gqa_options(dtype):
    """attention() with everything at once against the oracle."""
    q, k, v = _tensors(dtype, kv_heads=2)
    options = dict(causal="bottom_right", window=(9, -1), softcap=3.0, dropout_p=0.2)
    out, lse = fa2_cpu.torch.attention(q, k, v, philox=torch.tensor([5, 6]), precision="exact", **options)
    dout = torch.randn_like(out)
    grads = torch.autograd.grad(out, (q, k, v), dout)
    options.update(philox_seed=5, philox_offset=6)
    expected_out, _ = oracle_forward(q, k, v, **options)
    expected = oracle_backward(dout, q, k, v, out, lse, **options)
    bound = BOUNDS[str(dtype).removeprefix("torch.")]
    for a, b in zip((out.detach(), *grads), (expected_out, *expected[:3])):
        assert a.dtype == dtype and relative_l2(a.double(), b) <= bound


def test_other_devices_are_refused():
    with pytest.raises(TypeError, match="query is on device meta"):
        scaled_dot_product_attention(*(x.detach().to("meta") for x in _tensors()))


def test_num_threads_follow_torch():
    q, k, v = _tensors()
    threads = torch.get_num_threads()
    two = scaled_dot_product_attention(q, k, v)
    try:
        torch.set_num_threads(1)
        np.testing.assert_array_equal(scaled_dot_product_attention(q, k, v).detach(), two.detach())
    finally:
        torch.set_num_threads(threads)
