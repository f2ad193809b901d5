# SPDX-License-Identifier: Apache-2.0
"""torch.func and forward-mode AD; profilers; whether fa2 is in place."""

import pytest

torch = pytest.importorskip("torch")

import fa2_cpu.torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch.autograd import forward_ad  # noqa: E402
from torch.func import grad, jvp, vmap  # noqa: E402


def _plain(q, k, v):
    return torch.softmax(q @ k.mT / q.shape[-1] ** 0.5, -1) @ v


@pytest.fixture
def qkv():
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, 4, 19, 8, generator=generator) for _ in range(3)]


@pytest.fixture(params=["one call", "replaced"])
def sdpa(request):
    if request.param == "one call":
        yield fa2_cpu.torch.scaled_dot_product_attention
    else:
        with fa2_cpu.torch.replace_sdpa():
            yield F.scaled_dot_product_attention


def test_jvp(qkv, sdpa):
    tangents = [x.flip(0) for x in qkv]
    _, got = jvp(sdpa, tuple(qkv), tuple(tangents))
    torch.testing.assert_close(got, jvp(_plain, tuple(qkv), tuple(tangents))[1])
    with forward_ad.dual_level():
        dual = [forward_ad.make_dual(*pair) for pair in zip(qkv, tangents)]
        torch.testing.assert_close(forward_ad.unpack_dual(sdpa(*dual)).tangent, got)


def test_transforms_of_attention(qkv):
    def out(q, k, v):
        return fa2_cpu.torch.attention(q, k, v)[0]

    q, k, v = qkv
    tangents = [x.flip(0) for x in qkv]
    got, expected = (jvp(f, (q, k, v), tuple(tangents))[1] for f in (out, _plain))
    torch.testing.assert_close(got, expected)
    with forward_ad.dual_level():
        dual = out(*(forward_ad.make_dual(*pair) for pair in zip(qkv, tangents)))
        torch.testing.assert_close(forward_ad.unpack_dual(dual).tangent, expected)
    stacked = [torch.stack((x, x.flip(0))) for x in qkv]
    torch.testing.assert_close(vmap(out)(*stacked), vmap(_plain)(*stacked))
    got, expected = (vmap(grad(lambda *x: f(*x).square().sum(), (0, 1, 2)))(*stacked) for f in (out, _plain))
    for a, b in zip(got, expected):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_transforms_under_a_block_mask(qkv):
    """As under the same mask as an array."""
    visible = torch.rand(19, 19, generator=torch.Generator().manual_seed(1)) > 0.4
    mask = fa2_cpu.BlockMask.from_dense(visible, 16)
    tangents = tuple(x.flip(0) for x in qkv)
    results = []
    for masked in ({"bias": visible}, {"block_mask": mask}):

        def loss(q, k, v, masked=masked):
            return fa2_cpu.torch.attention(q, k, v, **masked)[0].square().sum()

        gradient = grad(loss, (0, 1, 2))
        stacked = [torch.stack((x, x.flip(0))) for x in qkv]
        results.append([
            jvp(loss, tuple(qkv), tangents)[1], *gradient(*qkv), *vmap(gradient)(*stacked),
            *jvp(gradient, tuple(qkv), tangents)[1],
        ])  # fmt: skip
    for got, expected in zip(*results):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


def test_grad_and_vmap_of_grad(qkv, sdpa):
    q, k, v = qkv
    for function in (lambda f: grad(lambda *x: f(*x).square().sum(), (0, 1, 2))(q, k, v),
                     lambda f: vmap(grad(lambda *x: f(*x).square().sum(), (0, 1, 2)))(q, k, v)):  # fmt: skip
        for got, expected in zip(function(sdpa), function(_plain)):
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


def test_profilers_show_the_operators_name(qkv, sdpa):
    q, k, v = (x.requires_grad_() for x in qkv)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        sdpa(q, k, v).sum().backward()
    names = {event.key: event for event in profile.key_averages()}
    assert {"fa2::attention", "fa2::attention_backward"} <= names.keys()
    assert not any(name.startswith("GeneratedBackwardFor") for name in names)


_TARGET = torch.tensor([3, -100, 0])
_ANGLES = torch.outer(torch.arange(3.0), torch.tensor([1.0, 0.3])).double()
# Functions of x [3, 6] and of a weight [5, 6], and the same by PyTorch.
STEP = {
    "rms_norm": (lambda x, w: fa2_cpu.torch.rms_norm(x, (6,), w[0], 1e-6, offset=1.0),
                 lambda x, w: F.rms_norm(x, (6,), w[0] + 1, 1e-6)),
    "softmax": (lambda x, w: fa2_cpu.torch.softmax(x, 0), lambda x, w: torch.softmax(x, 0)),
    "swiglu": (lambda x, w: fa2_cpu.torch.swiglu(x, w[:3]), lambda x, w: F.silu(x) * w[:3]),
    "embedding": (lambda x, w: fa2_cpu.torch.embedding(torch.tensor([4, 0, 4]), w), lambda x, w: w[[4, 0, 4]]),
    "rotary": (lambda x, w: fa2_cpu.torch.apply_rotary_emb(x[None, None], _ANGLES.cos(), _ANGLES.sin()),
               lambda x, w: torch.cat((x[:, :2] * _ANGLES.cos() - x[:, 2:4] * _ANGLES.sin(),
                                       x[:, 2:4] * _ANGLES.cos() + x[:, :2] * _ANGLES.sin(), x[:, 4:]), 1)[None, None]),
    "cross_entropy": (lambda x, w: fa2_cpu.torch.cross_entropy(x, _TARGET), lambda x, w: F.cross_entropy(x, _TARGET)),
    "linear_cross_entropy": (lambda x, w: fa2_cpu.torch.linear_cross_entropy(x, w, _TARGET, z_loss=0.1),
                             lambda x, w: F.cross_entropy(x @ w.T, _TARGET)
                             + 0.1 * torch.logsumexp(x @ w.T, 1)[::2].square().mean()),
}  # fmt: skip


@pytest.mark.parametrize("name", STEP)
def test_transforms_of_the_rest_of_a_step(name):
    ours, plain = STEP[name]
    generator = torch.Generator().manual_seed(1)
    x, w, dx, dw = (torch.randn(n, 6, generator=generator, dtype=torch.float64) for n in (3, 5, 3, 5))
    torch.testing.assert_close(jvp(ours, (x, w), (dx, dw)), jvp(plain, (x, w), (dx, dw)))
    with forward_ad.dual_level():
        tangent = forward_ad.unpack_dual(ours(forward_ad.make_dual(x, dx), forward_ad.make_dual(w, dw))).tangent
    torch.testing.assert_close(tangent, jvp(plain, (x, w), (dx, dw))[1])
    grads = [grad(lambda x, w: function(x, w).square().sum(), (0, 1)) for function in (ours, plain)]
    batch = torch.stack((x, dx)), torch.stack((w, dw))
    torch.testing.assert_close(*(g(x, w) for g in grads))
    torch.testing.assert_close(*(vmap(g)(*batch) for g in grads))


def test_profilers_name_the_rest_of_a_step():
    x = torch.randn(200, 300, requires_grad=True)
    fa2_cpu.torch.swiglu(x, x)  # what the first call does besides
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        fa2_cpu.torch.swiglu(x, x)
    times = {}
    for event in profile.key_averages():
        times[event.key] = times.get(event.key, 0) + event.self_cpu_time_total
    assert times["fa2::swiglu"] > sum(time for name, time in times.items() if name.startswith("GeneratedBackwardFor"))


def test_one_knows_whether_fa2_is_in_place():
    assert not fa2_cpu.torch.is_active()
    replacement = fa2_cpu.torch.replace_sdpa()
    assert fa2_cpu.torch.is_active() and "fa2 computes" in repr(replacement)
    with fa2_cpu.torch.replace_sdpa():
        replacement.remove()
        assert fa2_cpu.torch.is_active() and "another replacement" in repr(replacement)
    assert not fa2_cpu.torch.is_active() and "PyTorch computes" in repr(replacement)
