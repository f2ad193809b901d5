# SPDX-License-Identifier: Apache-2.0
"""Second derivatives of attention: against finite differences and PyTorch's own, what uses them, what they cost."""

import contextlib
import os
import resource
import threading

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402
from torch.autograd import grad, gradcheck, gradgradcheck  # noqa: E402
from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: E402

import fa2_cpu.torch  # noqa: E402
from conftest import relative_l2  # noqa: E402
from fa2_cpu import philox_keep_mask  # noqa: E402
from fa2_cpu.torch import _score_blocks, attention, scaled_dot_product_attention  # noqa: E402

B, H, HKV, NQ, NK, D, DV = 2, 4, 2, 7, 9, 4, 3


@pytest.fixture(params=["one block", "many blocks"])
def blocks(request, monkeypatch):
    if request.param == "many blocks":
        monkeypatch.setattr(_score_blocks, "_ELEMENTS", 64)
        monkeypatch.setattr(_score_blocks, "_ROWS", 4)


def _inputs(dtype=torch.float64, heads=H, kv_heads=HKV):
    generator = torch.Generator().manual_seed(0)
    shapes = ((B, heads, NQ, D), (B, kv_heads, NK, D), (B, kv_heads, NK, DV))
    return [torch.randn(s, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for s in shapes]


def _bias(kind):
    generator = torch.Generator().manual_seed(1)
    shape = {"bool": (B, 1, NQ, NK), "float": (1, H, NQ, NK), "keys": (B, 1, 1, NK)}[kind]
    if kind == "bool":
        mask = torch.rand(shape, generator=generator) > 0.4
        mask[:, :, 2] = False  # a row that sees nothing
        return mask
    return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()


def plain(q, k, v, *, causal=None, window=(-1, -1), bias=None, softcap=0.0, alibi_slopes=None, sinks=None,
          dropout_p=0.0, philox=None, scale=None):  # fmt: skip
    """attention() of PyTorch's own operators on [B, H, N, D], with all scores in memory."""
    (batch, heads, nq, head_dim), nk = q.shape, k.shape[2]
    k, v = (x.repeat_interleave(heads // k.shape[1], 1) for x in (k, v))
    s = q @ k.mT * (head_dim**-0.5 if scale is None else scale)
    if softcap:
        s = softcap * torch.tanh(s / softcap)
    offset = torch.arange(nk) - torch.arange(nq)[:, None] - (nk - nq)
    diagonal = offset + (nk - nq) if causal == "top_left" else offset
    hidden = torch.zeros(nq, nk, dtype=torch.bool)
    if causal:
        hidden |= diagonal > 0
    if window[0] >= 0:
        hidden |= diagonal < -window[0]
    if window[1] >= 0:
        hidden |= diagonal > window[1]
    if bias is not None and bias.dtype == torch.bool:
        hidden = hidden | ~bias
    elif bias is not None:
        s = s + bias
    if alibi_slopes is not None:
        s = s - alibi_slopes.to(s.dtype)[..., None, None] * offset.abs()
    s = s.masked_fill(hidden, -1e30)  # finite: a row of -inf has no derivative
    every = s if sinks is None else torch.cat((s, sinks.to(s.dtype)[:, None, None].expand(batch, heads, nq, 1)), -1)
    lse = torch.logsumexp(every, -1)
    p = torch.exp(s - lse[..., None]).masked_fill(hidden, 0.0)
    if dropout_p:
        keep = philox_keep_mask((batch, heads, nq, nk), dropout_p, *philox.tolist())
        p = p * torch.from_numpy(keep) / (1 - dropout_p)
    return p @ v, lse


OPTIONS = {
    "plain": {},
    "scale": {"scale": 0.3},
    "causal": {"causal": "top_left"},
    "bottom right window": {"causal": "bottom_right", "window": (3, -1)},
    "window": {"window": (1, 2)},
    "bool": {"bias": "bool"},
    "float": {"bias": "float", "causal": "bottom_right"},
    "keys": {"bias": "keys"},
    "softcap": {"softcap": 1.5, "bias": "keys"},
    "dropout": {"dropout_p": 0.3, "philox": torch.tensor([5, 1 << 40])},
    "everything": {"softcap": 2.0, "dropout_p": 0.2, "philox": torch.tensor([3, 9]), "bias": "float", "window": (4, 3)},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_gradgradcheck(options):
    options = dict(options)
    inputs = _inputs()
    bias = _bias(options.pop("bias")) if "bias" in options else None
    leaves = inputs if bias is None or bias.dtype == torch.bool else [*inputs, bias]

    def function(q, k, v, bias=bias):
        out, lse = attention(q, k, v, bias=bias, **options)
        return out, lse.nan_to_num(neginf=0.0)

    assert gradcheck(function, leaves, fast_mode=True, check_forward_ad=True)
    assert gradgradcheck(function, leaves, fast_mode=True, check_fwd_over_rev=True)


VECTORS = {
    "slopes": {"alibi_slopes": torch.rand(B, H)},
    "shared slopes": {"alibi_slopes": torch.rand(H), "causal": "bottom_right"},
    "sinks": {"sinks": torch.randn(H)},
    "sinks alone": {"sinks": torch.randn(H), "causal": "bottom_right", "window": (2, -1), "bias": "bool"},
    "both": {"alibi_slopes": torch.rand(H), "sinks": torch.randn(H), "softcap": 2.0, "bias": "float"},
}


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("options", VECTORS.values(), ids=VECTORS.keys())
def test_against_plain(options, layout, blocks):
    """Slopes and sinks are f32, for which finite differences are too coarse; dlse and dout require gradients too."""
    options = dict(options)
    inputs = _inputs()
    if "bias" in options:
        options["bias"] = _bias(options["bias"])
    vectors = [options[name].requires_grad_() for name in ("alibi_slopes", "sinks") if name in options]
    if "bias" in options and options["bias"].dtype != torch.bool:
        vectors.append(options["bias"])
    dout = torch.linspace(-1, 1, B * H * NQ * DV, dtype=torch.float64).view(B, H, NQ, DV).requires_grad_()
    dlse = torch.linspace(1, -2, B * H * NQ, dtype=torch.float64).view(B, H, NQ).requires_grad_()
    results = []
    for function in (attention, plain):
        if function is attention and layout == "bshd":
            out, lse = attention(*(x.transpose(1, 2) for x in inputs), layout=layout, **options)
            out = out.transpose(1, 2)
        else:
            out, lse = function(*inputs, **options)
        first = grad((out, lse), (*inputs, *vectors), (dout, dlse), create_graph=True)
        score = sum((g * torch.linspace(-1, 2, g.numel(), dtype=g.dtype).view(g.shape)).sum() for g in first)
        results.append(grad(score, (*inputs, *vectors, dout, dlse)))
    for got, expected in zip(*results):
        # Sums over keys of what sinks and slopes move are rounded to f32.
        assert relative_l2(got, expected) <= 2e-6


def test_packed_sequences(blocks):
    lengths_q, lengths_k = (3, 0, 7, 4), (5, 2, 0, 9)
    starts = [torch.tensor([0, *x]).cumsum(0).to(torch.int32) for x in (lengths_q, lengths_k)]
    generator = torch.Generator().manual_seed(0)
    shapes = ((14, H, D), (16, HKV, D), (16, HKV, DV))
    inputs = [torch.randn(s, generator=generator, dtype=torch.float64).requires_grad_() for s in shapes]
    philox = torch.tensor([4, 4])

    def function(q, k, v):
        out, lse = attention(q, k, v, layout="thd", causal="bottom_right", cu_seqlens_q=starts[0],
                             cu_seqlens_k=starts[1], dropout_p=0.2, philox=philox, softcap=2.0)  # fmt: skip
        return out, lse.nan_to_num(neginf=0.0)

    assert gradgradcheck(function, inputs, fast_mode=True, check_fwd_over_rev=True)
    sinks = torch.randn(H, generator=generator).requires_grad_()
    _, lse = attention(*inputs, layout="thd", cu_seqlens_q=starts[0], cu_seqlens_k=starts[1], sinks=sinks)
    weights = torch.ones_like(lse).requires_grad_()
    (dsinks,) = grad(lse, sinks, weights, create_graph=True)
    (of_weights,) = grad(dsinks.sum(), weights)
    shares = torch.exp(sinks.double()[:, None] - lse)  # what P leaves to the sink: 1 in sequences without keys
    assert relative_l2(of_weights, shares.detach()) <= 1e-6


@pytest.mark.parametrize(
    "dtype, bound", [(torch.float32, 2e-6), (torch.bfloat16, 1e-2), (torch.float16, 2e-3)], ids=str
)
def test_dtypes(dtype, bound, blocks):
    results = []
    for kind in (dtype, torch.float64):
        x = [t.detach().to(kind).requires_grad_() for t in _inputs(dtype)]
        with sdpa_kernel(SDPBackend.MATH):
            function = scaled_dot_product_attention if kind is dtype else F.scaled_dot_product_attention
            first = grad(function(*x, is_causal=True, enable_gqa=True).sum(-1).square().sum(), x, create_graph=True)
        results.append(grad(sum(g.double().square().sum() for g in first).to(kind), x))
    for got, expected in zip(*results):
        assert got.dtype == dtype and relative_l2(got.double(), expected) <= bound


def test_replaced(blocks):
    q, k, v = _inputs(heads=HKV)
    penalties = []
    for replace in (True, False):
        mask = torch.linspace(-1, 1, NQ * NK, dtype=torch.float64).view(NQ, NK).requires_grad_()
        with fa2_cpu.torch.replace_sdpa() if replace else sdpa_kernel(SDPBackend.MATH):
            out = F.scaled_dot_product_attention(q, k, v, mask)
        assert not replace or "Attention" in type(out.grad_fn).__name__
        first = grad(out.square().sum(), (q, k, v, mask), create_graph=True)
        penalties.append(grad(sum(g.square().sum() for g in first), (q, k, v, mask)))
    for got, expected in zip(*penalties):
        assert relative_l2(got, expected) <= 1e-12


@pytest.mark.parametrize("function", [attention, scaled_dot_product_attention], ids=lambda f: f.__name__)
def test_hessian_vector_products(function):
    from torch.func import grad as func_grad, jvp, vjp

    x = tuple(t.detach() for t in _inputs(heads=HKV))
    directions = tuple(t.flip(0) for t in x)

    def products(f):
        def loss(*x):
            out = f(*x)
            return (out[0] if isinstance(out, tuple) else out).square().sum()

        gradient = func_grad(loss, (0, 1, 2))
        yield jvp(gradient, x, directions)[1]
        yield vjp(gradient, *x)[1](directions)
        yield func_grad(lambda *x: jvp(loss, x, directions)[1], (0, 1, 2))(*x)
        yield torch.autograd.functional.hvp(loss, x, directions)[1]

    for got, expected in zip(products(function), products(plain)):
        for a, b in zip(got, expected):
            assert relative_l2(a, b) <= 1e-12


def test_hessian():
    q, k, v = (t.detach()[:1, :2] for t in _inputs())
    results = [torch.func.hessian(lambda q: f(q, k, v)[0].square().sum())(q[:, :, :3]) for f in (attention, plain)]
    assert relative_l2(*results) <= 1e-12


class _Layer(torch.nn.Module):
    """A pre-norm transformer layer without dropout; the attention is a function."""

    def __init__(self, width, heads, function):
        super().__init__()
        self.heads, self.function = heads, function
        self.qkv, self.out = torch.nn.Linear(width, 3 * width), torch.nn.Linear(width, width)
        self.mlp = torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.SiLU(), torch.nn.Linear(width, width))

    def forward(self, x, bias=None):
        parts = self.qkv(F.layer_norm(x, x.shape[-1:])).chunk(3, -1)
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in parts)
        x = x + self.out(self.function(q, k, v, bias).transpose(1, 2).flatten(2))
        return x + self.mlp(x)


def _math(q, k, v, bias=None):
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(q, k, v, bias)


def _train(make, loss, steps=4):
    """Losses of a few steps of Adam and the last gradients, of a model in float64."""
    torch.manual_seed(0)
    model = make().double()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        value = loss(model)
        value.backward()
        optimizer.step()
        losses.append(value.item())
    return torch.tensor(losses), torch.cat([p.grad.flatten() for p in model.parameters()])


def test_gradient_penalty():
    """A WGAN-GP critic (Gulrajani et al. 2017, arXiv:1704.00028): (‖∇ₓ critic(x)‖ − 1)² is in the loss."""

    class Critic(torch.nn.Module):
        def __init__(self, function):
            super().__init__()
            self.layers = torch.nn.ModuleList(_Layer(16, 2, function) for _ in range(2))
            self.head = torch.nn.Linear(16, 1)

        def forward(self, x):
            for layer in self.layers:
                x = layer(x)
            return self.head(x.mean(1))

    generator = torch.Generator().manual_seed(2)
    real, fake = (torch.randn(3, 11, 16, generator=generator, dtype=torch.float64) + shift for shift in (0.5, -0.5))

    def loss(critic):
        mixed = (0.3 * real + 0.7 * fake).requires_grad_()
        (slope,) = grad(critic(mixed).sum(), mixed, create_graph=True)
        penalty = (slope.flatten(1).norm(dim=1) - 1).square().mean()
        return critic(fake).mean() - critic(real).mean() + 10 * penalty

    got, expected = (_train(lambda: Critic(f), loss) for f in (scaled_dot_product_attention, _math))
    assert got[0][-1] < got[0][0]
    for a, b in zip(got, expected):
        assert relative_l2(a, b) <= 1e-9


def test_force_matching():
    """A potential of atoms whose attention is biased by distances; forces −∇E are matched."""

    class Potential(torch.nn.Module):
        def __init__(self, function):
            super().__init__()
            self.embedding = torch.nn.Parameter(torch.randn(9, 16))
            self.layers = torch.nn.ModuleList(_Layer(16, 4, function) for _ in range(2))
            self.decay = torch.nn.Parameter(torch.ones(4))
            self.head = torch.nn.Linear(16, 1)

        def forward(self, positions):
            distance = (positions[:, :, None] - positions[:, None]).square().sum(-1).add(1e-2).sqrt()
            bias = -self.decay[:, None, None] * distance[:, None]
            x = self.embedding + torch.exp(-distance) @ self.embedding
            for layer in self.layers:
                x = layer(x, bias)
            return self.head(x).sum((1, 2))

    generator = torch.Generator().manual_seed(3)
    positions = torch.randn(2, 9, 3, generator=generator, dtype=torch.float64).requires_grad_()
    forces = torch.randn(2, 9, 3, generator=generator, dtype=torch.float64)

    def loss(potential):
        energy = potential(positions)
        (slope,) = grad(energy.sum(), positions, create_graph=True)
        return energy.square().mean() * 1e-3 + (-slope - forces).square().mean()

    got, expected = (_train(lambda: Potential(f), loss) for f in (scaled_dot_product_attention, _math))
    assert got[0][-1] < got[0][0]
    for a, b in zip(got, expected):
        assert relative_l2(a, b) <= 1e-9


def test_third_derivatives_are_refused():
    q, k, v = _inputs()
    first = grad(attention(q, k, v)[0].square().sum(), q, create_graph=True)[0]
    second = grad(first.square().sum(), q, create_graph=True)[0]
    with pytest.raises(NotImplementedError, match="no third derivative of attention"):
        grad(second.sum(), q)
    x = [t.detach() for t in (q, k, v)]
    norm = lambda f: lambda q: f(q).square().sum()  # noqa: E731
    gradient = torch.func.grad(norm(torch.func.grad(norm(lambda q: attention(q, *x[1:])[0]))))
    with pytest.raises(NotImplementedError, match="no third derivative of attention"):
        torch.func.jvp(gradient, (x[0],), (x[0],))
    with pytest.raises(NotImplementedError, match="jvp of grad"):
        torch.func.jvp(lambda q: torch.func.jvp(lambda q: attention(q, *x[1:])[0], (q,), (q,))[1], (x[0],), (x[0],))


def test_third_derivatives_by_transforms_are_pytorchs():
    q, k, v = (t.detach() for t in _inputs(heads=HKV))

    def thrice(f):
        g = lambda t: f(t * q, k, v).square().sum()  # noqa: E731
        return torch.func.grad(torch.func.grad(torch.func.grad(g)))(torch.tensor(1.0, dtype=torch.float64))

    torch.testing.assert_close(thrice(scaled_dot_product_attention), thrice(lambda *x: plain(*x)[0]))


def _peak_rss(function):
    """Bytes by which the process grew at most while function ran."""
    page, peak, stop = resource.getpagesize(), [0], threading.Event()

    def resident():
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * page

    def watch():
        while not stop.wait(0.001):
            peak[0] = max(peak[0], resident())

    before = resident()
    thread = threading.Thread(target=watch)
    thread.start()
    function()
    stop.set()
    thread.join()
    return peak[0] - before


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="reads /proc")
def test_memory_grows_with_n_alone():
    n = 4096
    x = [torch.randn(1, 1, n, 16, requires_grad=True) for _ in range(3)]

    def penalty():
        first = grad(scaled_dot_product_attention(*x).square().sum(), x, create_graph=True)
        grad(sum(g.square().sum() for g in first), x)

    small = [t[:, :, :256] for t in x]
    grad(sum(g.square().sum() for g in grad(attention(*small)[0].sum(), small, create_graph=True)), small)  # pools
    assert _peak_rss(penalty) < n * n * 4 // 2  # a few MiB of blocks; PyTorch's math path: 5 matrices of 64 MiB


def test_under_autocast_and_traced():
    """The backward may run where a forward in bf16 would: sums stay f32. Operators have second derivatives too."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            return function(*args, **(kwargs or {}))

    x = _inputs(torch.float32)
    results = []
    for around in (contextlib.nullcontext(), Watch(), torch.autocast("cpu", dtype=torch.bfloat16)):
        first = grad(attention(*x)[0].square().sum(), x, create_graph=True)
        score = sum(g.square().sum() for g in first)
        with around:
            results.append(grad(score, x))
            if isinstance(around, Watch):
                first = grad(attention(*x)[0].square().sum(), x, create_graph=True)
                results.append(grad(sum(g.square().sum() for g in first), x))
    for result in results[1:]:
        for got, expected in zip(result, results[0]):
            assert relative_l2(got, expected) <= 1e-5
