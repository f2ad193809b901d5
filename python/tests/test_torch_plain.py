# SPDX-License-Identifier: Apache-2.0
"""Calls without dropout and a gradient of the mask go the short way: which, and with the bits of the general one."""

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402
from torch.autograd import forward_ad  # noqa: E402
from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

import fa2_cpu.torch  # noqa: E402
from fa2_cpu.torch import _plain  # noqa: E402

function = fa2_cpu.torch.scaled_dot_product_attention


class _Calls:
    """How many calls went the short way, and how many have been refused it."""

    def __init__(self):
        self.taken = self.refused = 0


@pytest.fixture
def calls(monkeypatch):
    counts, attention = _Calls(), _plain.attention

    def counted(*arguments):
        counts.taken += 1  # also where the core refuses, or a checkpoint stops the call early
        out = attention(*arguments)
        if out is None:
            counts.taken -= 1
            counts.refused += 1
        return out

    monkeypatch.setattr(_plain, "attention", counted)
    return counts


@pytest.fixture(params=["one call", "replaced"])
def sdpa(request):
    if request.param == "one call":
        yield function
    else:
        with fa2_cpu.torch.replace_sdpa():
            yield F.scaled_dot_product_attention


@pytest.fixture
def general(monkeypatch):
    """The function by the general way."""

    def call(*arguments, **keywords):
        with monkeypatch.context() as patch:
            patch.setattr(_plain, "attention", lambda *_: None)
            return function(*arguments, **keywords)

    return call


def _qkv(dtype=torch.float32, shapes=((2, 4, 19, 16), (2, 4, 23, 16), (2, 4, 23, 8))):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(s, generator=generator).to(dtype).requires_grad_() for s in shapes]


def _results(call, tensors, **keywords):
    """out, and the gradients of those tensors that require one."""
    out = call(*tensors, **keywords)
    weights = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).reshape(out.shape).to(out.dtype)
    return [out, *torch.autograd.grad(out, [x for x in tensors if x.requires_grad], weights)]


def _same(got, expected):
    assert len(got) == len(expected)
    for a, b in zip(got, expected):
        assert a.dtype == b.dtype and a.stride() == b.stride() and torch.equal(a, b)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("keywords", [{}, dict(is_causal=True), dict(scale=0.37)], ids=str)
def test_same_bits(sdpa, calls, general, dtype, keywords):
    tensors = _qkv(dtype)
    got = _results(sdpa, tensors, **keywords)
    assert calls.taken == 1
    _same(got, _results(general, tensors, **keywords))


def _masks():
    generator = torch.Generator().manual_seed(1)
    numbers = torch.randn(2, 4, 19, 23, generator=generator)
    shows = numbers > -0.5
    return {
        "mask": shows,
        "mask of all": shows[0, 0],
        "padding": shows[:, :1, :1],
        "bias": numbers,
        "bias of heads": numbers[:1].to(torch.bfloat16),
        "bias of keys": numbers[0, 0, 0].double(),
        "bias of queries": numbers[..., :1],
        "strided": numbers.transpose(2, 3).contiguous().transpose(2, 3),
        "expanded": numbers[:, :1].expand(2, 4, 19, 23),
        "hidden rows": shows & (torch.arange(19) % 3 > 0)[:, None],
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("name", list(_masks()))
def test_same_bits_under_masks(sdpa, calls, general, dtype, name):
    tensors, mask = _qkv(dtype), _masks()[name]
    if dtype is not torch.float64 and mask.dtype is torch.float64:
        mask = mask.to(dtype)
    got = _results(sdpa, tensors, attn_mask=mask)
    assert calls.taken == 1
    _same(got, _results(general, tensors, attn_mask=mask))
    with torch.no_grad():
        assert torch.equal(sdpa(*tensors, attn_mask=mask), got[0])
        if mask.dtype is not torch.bool:  # its gradient is not asked for
            assert torch.equal(sdpa(*tensors, attn_mask=torch.nn.Parameter(mask)), got[0])
    assert calls.refused == 0


def test_second_derivatives_under_a_bias(sdpa, calls, general):
    bias = _masks()["bias"].double()

    def penalty(call):
        tensors = _qkv(torch.float64)
        slopes = torch.autograd.grad(call(*tensors, attn_mask=bias).square().sum(), tensors, create_graph=True)
        return torch.autograd.grad(sum(x.square().sum() for x in slopes), tensors)

    got = penalty(sdpa)
    assert calls.taken == 1
    _same(got, penalty(general))


def test_a_bias_changed_before_the_backward_is_an_error(sdpa):
    bias = _masks()["bias"]
    out = sdpa(*_qkv(), attn_mask=bias)
    bias.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_grouped_heads_and_strides(sdpa, calls, general):
    q, k, v = _qkv(shapes=((2, 4, 19, 16), (2, 2, 23, 16), (2, 2, 23, 8)))
    base = _qkv(shapes=((2, 19, 3, 4, 16),))[0]
    expanded = k[:, :1].expand(2, 4, 23, 16), v[:, :1].expand(2, 4, 23, 8)
    negative = torch._neg_view(k)
    sliced = [x.transpose(1, 2) for x in base.unbind(2)]
    for tensors, leaves, keywords in (
        ((q, k, v), (q, k, v), dict(enable_gqa=True)),
        ((q, *expanded), (q, k, v), {}),
        (sliced, (base,), dict(is_causal=True)),
        ((torch.nn.Parameter(q.detach()), *expanded), (k, v), {}),
    ):
        outs = [call(*tensors, **keywords) for call in (sdpa, general)]
        _same(*([out, *torch.autograd.grad(out.square().sum(), leaves)] for out in outs))
    assert calls.taken == 4
    _same(*(_results(call, (q, negative, v), enable_gqa=True) for call in (sdpa, general)))
    assert calls.taken == 4


@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (0, 2), (1, 2)], ids=str)
def test_some_require_gradients(sdpa, calls, general, wanted):
    tensors = [x.requires_grad_(i in wanted) for i, x in enumerate(_qkv())]
    _same(_results(sdpa, tensors), _results(general, tensors))
    assert calls.taken == 1


def test_without_gradients(sdpa, calls, general):
    tensors = _qkv()
    with torch.no_grad():
        out = sdpa(*tensors)
    assert not out.requires_grad and sdpa(*(x.detach() for x in tensors)).grad_fn is None
    with torch.inference_mode():
        inferred = sdpa(*(x.clone() for x in tensors))
        assert inferred.is_inference() and torch.equal(sdpa(*tensors), inferred)
    assert calls.taken == 4
    _same([out, inferred], [general(*tensors).detach()] * 2)


def test_second_derivatives(sdpa, calls, general):
    def penalty(call):
        tensors = _qkv(torch.float64)
        slopes = torch.autograd.grad(call(*tensors).square().sum(), tensors, create_graph=True)
        return torch.autograd.grad(sum(x.square().sum() for x in slopes), tensors)

    got = penalty(sdpa)
    assert calls.taken == 1
    _same(got, penalty(general))


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint(sdpa, calls, general, reentrant):
    tensors = _qkv()
    checkpoint(sdpa, *tensors, use_reentrant=reentrant).square().sum().backward()
    assert calls.taken == 2
    _same([x.grad for x in tensors], torch.autograd.grad(general(*tensors).square().sum(), tensors))


def test_autocast(calls, general):
    """The operator gets tensors that are cast already, the function casts them by the general way."""
    tensors = _qkv()
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype):
            with fa2_cpu.torch.replace_sdpa():
                got = F.scaled_dot_product_attention(*tensors)
            expected = function(*tensors)
        assert (calls.taken, calls.refused) == (1, 1) and got.dtype is dtype
        calls.taken = calls.refused = 0
        _same(*([out, *torch.autograd.grad(out.float().square().sum(), tensors)] for out in (got, expected)))
        assert torch.equal(got, general(*(x.to(dtype) for x in tensors)))
    doubles = _qkv(torch.float64)
    with torch.autocast("cpu", torch.bfloat16), fa2_cpu.torch.replace_sdpa():
        got = _results(F.scaled_dot_product_attention, doubles)
    assert calls.taken == 1
    _same(got, _results(general, doubles))


def test_the_profilers_name(sdpa, calls):
    tensors = _qkv()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        sdpa(*tensors).sum().backward()
    assert calls.taken == 1
    assert {"fa2::attention", "fa2::attention_backward"} <= {event.key for event in profile.key_averages()}


@pytest.mark.parametrize("transform", ["jvp", "dual", "grad", "vmap", "vmap of grad"])
def test_transforms_keep_the_general_way(sdpa, calls, general, transform):
    tensors = tuple(x.detach() for x in _qkv())
    stacked = tuple(torch.stack((x, x.flip(0))) for x in tensors)
    tangents = tuple(x.flip(0) for x in tensors)

    def dual(call):
        with forward_ad.dual_level():
            out = call(*(forward_ad.make_dual(*pair) for pair in zip(tensors, tangents)))
            return tuple(x.clone() for x in forward_ad.unpack_dual(out))

    def gradient(call):
        return torch.func.grad(lambda *x: call(*x).square().sum(), (0, 1, 2))

    run = {
        "jvp": lambda call: torch.func.jvp(call, tensors, tangents),
        "dual": dual,
        "grad": lambda call: gradient(call)(*tensors),
        "vmap": lambda call: (torch.func.vmap(call)(*stacked),),
        "vmap of grad": lambda call: torch.func.vmap(gradient(call))(*stacked),
    }[transform]
    got = run(sdpa)
    assert calls.taken == 0
    for a, b in zip(got, run(general)):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


class _Subclass(torch.Tensor):
    pass


class _Mode(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


def test_who_watches_operators_keeps_the_general_way(sdpa, calls, general):
    tensors = _qkv()
    with _Mode():
        _same(_results(sdpa, tensors), _results(general, tensors))
    assert calls.taken == 0
    out = sdpa(*(x.detach().as_subclass(_Subclass) for x in tensors))
    assert calls.taken == 0 and type(out) is _Subclass
    assert torch.equal(out.as_subclass(torch.Tensor), general(*tensors))


def test_a_trace_records_the_call(sdpa, general):
    tensors = [x.detach() for x in _qkv()]
    traced = torch.jit.trace(sdpa, tuple(tensors), check_trace=False)
    others = [x + 1 for x in tensors]
    assert torch.equal(traced(*others), general(*others))


def test_compiled(sdpa, calls, general):
    tensors = _qkv()
    compiled = torch.compile(lambda *x: sdpa(*x, is_causal=True), fullgraph=True, backend="aot_eager")
    _same(_results(compiled, tensors), _results(general, tensors, is_causal=True))
    assert calls.taken == 0


@pytest.mark.parametrize("wrong", [None, (1, 2), (0, 0, (1, 1, 1, 1), (1, 1, 1, 1)), [1.0], 3, "q"], ids=str)
def test_what_is_no_tensor_is_refused(calls, wrong):
    q, k, v = _qkv()
    for arguments in ((wrong, k, v), (q, wrong, v), (q, k, wrong)):
        with pytest.raises(TypeError, match=f"is of type {type(wrong).__name__}; it must be a torch.Tensor"):
            function(*arguments)
    if wrong is not None:
        with pytest.raises(TypeError, match="attn_mask is of type"):
            function(q, k, v, attn_mask=wrong)
    assert calls.taken == 0


def test_other_calls_keep_the_general_way(sdpa, calls):
    q, k, v = _qkv()
    sdpa(q, k, v, attn_mask=torch.zeros(19, 23, requires_grad=True)).sum().backward()
    sdpa(q[:1], k[:1], v[:1], attn_mask=torch.ones(2, 4, 19, 23).tril().bool())
    sdpa(q, k, v, attn_mask=torch._neg_view(torch.ones(19, 23)))
    sdpa(q, k, v, dropout_p=0.5)
    sdpa(q[0], k[0], v[0])
    sdpa(q, k[:1], v[:1])
    sdpa(q, k[:, :1], v[:, :1])
    assert (calls.taken, calls.refused) == (0, 7)
    with pytest.raises(ValueError, match="k has shape"):
        sdpa(q, k[..., :8], v)
    with fa2_cpu.torch.replace_sdpa(), sdpa_kernel(SDPBackend.MATH):
        calls.refused = 0
        F.scaled_dot_product_attention(q, k, v)
    assert (calls.taken, calls.refused) == (1, 0)  # the refused shape's; the math backend is not fa2
