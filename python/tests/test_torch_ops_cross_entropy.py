# SPDX-License-Identifier: Apache-2.0
"""cross_entropy and linear_cross_entropy of fa2_cpu.torch."""

import itertools
import os
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402

import fa2_cpu.torch as ft  # noqa: E402
from fa2_cpu.torch import _linear_cross_entropy  # noqa: E402

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
BOUNDS = {torch.float32: 2e-6, torch.bfloat16: 4e-3, torch.float16: 1e-3, torch.float64: 1e-13}


def _error(result, expected):
    result, expected = result.detach().double(), expected.detach().double()
    return ((result - expected).norm() / expected.norm().clamp_min(1e-300)).item()


def _case(dtype, positions=13, vocab=37, hidden=11):
    generator = torch.Generator().manual_seed(7)
    randn = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    logits = (3 * randn(positions, vocab)).to(dtype).requires_grad_()
    states = randn(positions, hidden).to(dtype).requires_grad_()
    weight = randn(vocab, hidden).to(dtype).requires_grad_()
    bias = randn(vocab).to(dtype).requires_grad_()
    target = torch.randint(0, vocab, (positions,), generator=generator)
    target[::4] = -100
    return logits, states, weight, bias, target


def _reference(logits, target, weight=None, reduction="mean", label_smoothing=0.0, z_loss=0.0, num_items=None):
    """By its definition in f64."""
    logits = logits.double()
    weight = torch.ones(logits.shape[-1], dtype=torch.float64) if weight is None else weight.double()
    counts = target != -100
    safe = target.masked_fill(~counts, 0)
    log_p = logits.log_softmax(-1)
    loss = (1 - label_smoothing) * -log_p.gather(-1, safe[:, None])[:, 0] * weight[safe]
    loss = loss - label_smoothing / logits.shape[-1] * (log_p * weight).sum(-1)
    loss = loss + z_loss * logits.logsumexp(-1).square() * weight[safe]
    loss = torch.where(counts, loss, 0.0)
    if reduction == "none":
        return loss
    if reduction == "sum":
        return loss.sum()
    return loss.sum() / (num_items or (weight[safe] * counts).sum())


OPTIONS = [
    dict(reduction=reduction, label_smoothing=smoothing, z_loss=z_loss, num_items=num_items, weighted=weighted)
    for reduction, smoothing, z_loss, num_items, weighted in itertools.product(
        ("mean", "sum", "none"), (0.0, 0.2), (0.0, 1e-2), (None, 30), (False, True)
    )
    if reduction == "mean" or num_items is None
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_cross_entropy(dtype):
    logits, *_, target = _case(dtype)
    classes = torch.rand(37, dtype=torch.float64) + 0.1
    for options in OPTIONS:
        options = dict(options)
        weight = classes if options.pop("weighted") else None
        loss = ft.cross_entropy(logits, target, None if weight is None else weight.to(dtype), **options)
        wide = logits.detach().double().requires_grad_()
        expected = _reference(wide, target, None if weight is None else weight.to(dtype), **options)
        assert loss.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        # The loss itself is not rounded to the dtype of the logits.
        assert _error(loss, expected) <= BOUNDS[torch.float64 if dtype == torch.float64 else torch.float32], options
        factor = torch.linspace(0.5, 1.5, 13) if options["reduction"] == "none" else torch.tensor(0.75)
        (grad,) = torch.autograd.grad(loss, logits, factor.to(loss.dtype))
        (expected_grad,) = torch.autograd.grad(expected, wide, factor.double())
        assert grad.dtype == dtype and _error(grad, expected_grad) <= 2 * BOUNDS[dtype], options


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("chunks", [1, 3, 13])
def test_linear_cross_entropy(dtype, chunks, monkeypatch):
    rows = -(-13 // chunks)
    monkeypatch.setattr(_linear_cross_entropy, "_CHUNK_BYTES", rows * 37 * torch.empty((), dtype=dtype).element_size())
    _, states, weight, bias, target = _case(dtype)
    # bf16 logits carry a rounding of their own, of some 10 in size.
    scale = 10 if dtype in (torch.bfloat16, torch.float16) else 1
    for gathers, options in itertools.product((False, True), OPTIONS):
        monkeypatch.setattr(_linear_cross_entropy, "_SHARE_WORTH_GATHERING", 2.0 if gathers else 0.0)
        options = {k: v for k, v in options.items() if k != "weighted"}
        for given in (bias, None):
            loss = ft.linear_cross_entropy(states, weight, target, linear_bias=given, **options)
            inputs = [states, weight] + ([] if given is None else [given])
            wide = [x.detach().double().requires_grad_() for x in inputs]
            expected = _reference(F.linear(*wide), target, **options)
            factor = torch.linspace(0.5, 1.5, 13) if options["reduction"] == "none" else torch.tensor(0.75)
            assert _error(loss, expected) <= scale * BOUNDS[dtype], options
            grads = torch.autograd.grad(loss, inputs, factor.to(loss.dtype))
            expected_grads = torch.autograd.grad(expected, wide, factor.double())
            for grad, want in zip(grads, expected_grads):
                assert grad.dtype == dtype and _error(grad, want) <= scale * 2 * BOUNDS[dtype], options


@pytest.mark.parametrize("chunks", [1, 3])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_class_weights_of_linear_cross_entropy(smoothing, chunks, monkeypatch):
    _, states, weight, _, target = _case(torch.float64)
    monkeypatch.setattr(_linear_cross_entropy, "_CHUNK_BYTES", -(-13 // chunks) * 37 * 8)
    classes = torch.rand(37, dtype=torch.float64)
    for reduction, num_items in (("mean", None), ("mean", 7.5), ("sum", None), ("none", None)):
        options = dict(reduction=reduction, label_smoothing=smoothing, z_loss=1e-2, num_items=num_items)
        loss, _, z_part = ft.linear_cross_entropy(states, weight, target, weight=classes, return_stats=True, **options)
        expected = _reference(states @ weight.T, target, classes, **options)
        torch.testing.assert_close(loss, expected)
        without = _reference(states @ weight.T, target, classes, **{**options, "z_loss": 0.0})
        torch.testing.assert_close(z_part, (expected - without).sum())
        factor = torch.linspace(0.5, 1.5, 13).double() if reduction == "none" else torch.tensor(0.75).double()
        grads = (torch.autograd.grad(x, (states, weight), factor) for x in (loss, expected))
        for grad, want in zip(*grads):
            torch.testing.assert_close(grad, want)


def test_stats_and_nothing_counted():
    logits, states, weight, _, target = _case(torch.float32)
    for call in (lambda **k: ft.cross_entropy(logits, k.pop("target", target), **k),
                 lambda **k: ft.linear_cross_entropy(states, weight, k.pop("target", target), **k)):  # fmt: skip
        loss, num_items, z_part = call(z_loss=0.1, return_stats=True)
        assert int(num_items) == int((target != -100).sum()) and num_items.dtype == torch.int64
        torch.testing.assert_close(loss - z_part, call())
        assert not num_items.requires_grad and not z_part.requires_grad
        # One mean over two halves, each divided by the number of both.
        halves = [target.clone(), target.clone()]
        halves[0][6:] = halves[1][:6] = -100
        parts = [call(target=half, num_items=num_items) for half in halves]
        torch.testing.assert_close(parts[0] + parts[1], call())
        nothing = call(target=torch.full_like(target, -100))
        assert nothing == 0
        grads = torch.autograd.grad(nothing, (logits, states, weight), allow_unused=True)
        assert all(g is None or not g.any() for g in grads)


def test_shapes_of_pytorch():
    generator = torch.Generator().manual_seed(3)
    for shape in ((5,), (4, 5), (4, 5, 3), (4, 5, 3, 2)):
        logits = torch.randn(*shape, generator=generator).requires_grad_()
        sizes = shape[:1] + shape[2:] if len(shape) > 1 else ()
        target = torch.randint(0, 5, sizes, generator=generator)
        for reduction in ("none", "mean"):
            loss = ft.cross_entropy(logits, target, reduction=reduction)
            expected = F.cross_entropy(logits, target, reduction=reduction)
            torch.testing.assert_close(loss, expected)
            torch.testing.assert_close(
                torch.autograd.grad(loss.sum(), logits), torch.autograd.grad(expected.sum(), logits)
            )
    probabilities = torch.rand(4, 5, 3, generator=generator).softmax(1)
    logits = torch.randn(4, 5, 3, generator=generator)
    torch.testing.assert_close(
        ft.cross_entropy(logits, probabilities, label_smoothing=0.1),
        F.cross_entropy(logits, probabilities, label_smoothing=0.1),
    )


def test_gradcheck():
    logits, states, weight, bias, target = _case(torch.float64, positions=5, vocab=7, hidden=3)
    for options in (dict(), dict(reduction="none", z_loss=0.1), dict(reduction="sum", label_smoothing=0.3)):
        assert torch.autograd.gradcheck(lambda x: ft.cross_entropy(x, target, **options), logits)
        assert torch.autograd.gradcheck(
            lambda x, w, b: ft.linear_cross_entropy(x, w, target, linear_bias=b, **options), (states, weight, bias)
        )


def test_opcheck():
    logits, states, weight, bias, target = _case(torch.float64, positions=5, vocab=7, hidden=3)
    # What tells apart a retained graph keeps no state that the check could trip over.
    tests = ("test_schema", "test_faketensor", "test_autograd_registration")
    torch.library.opcheck(
        torch.ops.fa2.cross_entropy.default, (logits, target, None, -100, "mean", 0.1, 0.1, None, True), test_utils=tests
    )
    torch.library.opcheck(
        torch.ops.fa2.linear_cross_entropy.default,
        (states, weight, target, bias, None, -100, "mean", 0.1, 0.1, None, [True, True, True]), test_utils=tests,
    )  # fmt: skip


@pytest.mark.parametrize("backend", ["aot_eager"])
def test_compile_without_breaks(backend):
    logits, states, weight, _, target = _case(torch.float32)

    def step(logits, states, weight, target, items):
        return ft.cross_entropy(logits, target, z_loss=0.1) * 2 + ft.linear_cross_entropy(
            states, weight, target, num_items=items
        )

    args = (logits, states, weight, target, torch.tensor(17))
    expected = torch.autograd.grad(step(*args), args[:3])
    results = torch.autograd.grad(torch.compile(step, fullgraph=True, backend=backend)(*args), args[:3])
    for result, want in zip(results, expected):
        torch.testing.assert_close(result, want)


def test_backward_costs_no_pass_and_may_run_twice():
    logits, *_, target = _case(torch.float32)
    loss = ft.cross_entropy(logits, target)
    first = torch.autograd.grad(loss, logits, retain_graph=True)[0]
    kept = first.clone()
    second = torch.autograd.grad(loss * 3, logits, retain_graph=True)[0]
    torch.testing.assert_close(second, 3 * kept)
    assert torch.equal(first, kept)
    assert torch.equal(torch.autograd.grad(loss, logits)[0], kept)
    with pytest.raises(RuntimeError, match="retain_graph"):
        torch.autograd.grad(loss, logits)


def test_autocast():
    _, states, weight, _, target = _case(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        loss = ft.linear_cross_entropy(states, weight, target)
    expected = ft.linear_cross_entropy(states.bfloat16(), weight.bfloat16(), target)
    assert torch.equal(loss, expected)
    loss.backward()
    assert states.grad.dtype == weight.grad.dtype == torch.float32


def test_wrong_calls_are_sentences():
    logits, states, weight, bias, target = _case(torch.float32)
    wrong = target.clone()
    wrong[5] = 37
    for call in (lambda: ft.cross_entropy(logits, wrong), lambda: ft.linear_cross_entropy(states, weight, wrong)):
        with pytest.raises(ValueError, match=r"targets\[\d+\] is 37; it must be in \[0, 37\)"):
            call()
    with pytest.raises(ValueError, match='reduction is "max"'):
        ft.cross_entropy(logits, target, reduction="max")
    with pytest.raises(ValueError, match="target has shape"):
        ft.cross_entropy(logits, target[:3])
    with pytest.raises(ValueError, match="target has shape"):
        ft.linear_cross_entropy(states, weight, target[:3])
    with pytest.raises(TypeError, match="linear_weight is torch.float64"):
        ft.linear_cross_entropy(states, weight.double(), target)
    both = (lambda *a, **k: ft.cross_entropy(logits, *a, **k), lambda *a, **k: ft.linear_cross_entropy(states, weight, *a, **k))
    for call in both:
        for given, error, sentence in (
            (dict(label_smoothing=2.0), ValueError, "label_smoothing is 2"),
            (dict(label_smoothing="a"), TypeError, "label_smoothing is 'a'; it must be a number"),
            (dict(z_loss=None), TypeError, "z_loss is None; it must be a number"),
            (dict(ignore_index=1.5), TypeError, "ignore_index is 1.5; it must be an int"),
            (dict(num_items="x"), TypeError, "num_items is 'x'; it must be a number"),
            (dict(num_items=torch.ones(2)), ValueError, "num_items has shape"),
            (dict(num_items=float("nan")), ValueError, "num_items is nan; it must be a finite number"),
            (dict(weight=torch.ones(36)), ValueError, "weight has shape .36,.; it must be .37,."),
            (dict(weight=torch.ones(37, requires_grad=True)), TypeError, "weight requires grad"),
            (dict(weight=[1.0] * 37), TypeError, "weight is of type list"),
        ):  # fmt: skip
            with pytest.raises(error, match=sentence):
                call(target, **given)
        for options in (dict(weight=torch.ones(37)), dict(weight=torch.ones(37), label_smoothing=0.1)):
            with pytest.raises(ValueError, match=r"targets\[\d+\] is 37; it must be in \[0, 37\)"):
                call(wrong, **options)
        for bad in ([1] * 13, target.to("meta"), target.to(torch.int16), target.bool()):
            with pytest.raises(TypeError, match="target is"):
                call(bad)
    with pytest.raises(ValueError, match="probabilities must be of input's"):
        ft.cross_entropy(logits, torch.ones(13, 36))


def test_logits_are_never_whole():
    """The peak of a process with 1 GiB of logits (16,384 positions of 32,768 ids in bf16) stays below half of it."""
    code = """
import torch, fa2_cpu.torch as ft
def peak():
    # Not getrusage, whose peak a process takes over from the one that started it.
    return next(int(x.split()[1]) for x in open("/proc/self/status") if x.startswith("VmHWM:")) * 1024
n, vocab, hidden = 16384, 32768, 8
states = torch.randn(n, hidden).bfloat16().requires_grad_()
weight = torch.randn(vocab, hidden).bfloat16().requires_grad_()
target = torch.randint(0, vocab, (n,))
def call(n):
    ft.linear_cross_entropy(states[:n], weight, target[:n]).backward()
call(8)
before = peak()
call(n)
print(peak() - before)
"""
    environment = {**os.environ, "OMP_NUM_THREADS": "2"}
    grown = int(subprocess.check_output([sys.executable, "-c", code], env=environment))
    assert grown < 16384 * 32768 * 2 // 2
