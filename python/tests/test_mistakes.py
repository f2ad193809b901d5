# SPDX-License-Identifier: Apache-2.0
"""What people get wrong is refused with a sentence: TypeError or ValueError, from every entry point."""

import numpy as np
import pytest

import fa2_cpu as fa2

torch = pytest.importorskip("torch")

import fa2_cpu.torch  # noqa: E402

SHAPE = (2, 4, 19, 8)


def _qkv():
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(SHAPE, generator=generator) for _ in range(3)]


_Q, _K, _V = _qkv()
BAD = {
    "list": lambda: _Q.tolist(),
    "None": lambda: None,
    "str": lambda: "q",
    "number": lambda: 3.0,
    "meta": lambda: _Q.to("meta"),
    "sparse": lambda: _Q.to_sparse(),
    "sparse rows": lambda: _Q[0, 0].to_sparse_csr(),
    "quantised": lambda: torch.quantize_per_tensor(_Q, 0.1, 0, torch.qint8),
    "nested": lambda: torch.nested.nested_tensor([_Q[0], _Q[1, :, :7]]),
    "int32": lambda: _Q.int(),
    "complex": lambda: _Q.to(torch.complex64),
    "float8": lambda: _Q.to(torch.float8_e4m3fn),
    "objects": lambda: np.array(_Q.numpy(), dtype=object),
    "float64 among float32": lambda: _Q.double(),
    "rank 1": lambda: _Q[0, 0, 0],
    "rank 0": lambda: torch.tensor(1.0),
}

CALLS = {
    "attention_forward q": lambda x: fa2.attention_forward(x, _K, _V),
    "attention_forward k": lambda x: fa2.attention_forward(_Q, x, _V),
    "reference v": lambda x: fa2.reference.attention_forward(_Q, _K, x),
    "attention_backward dout": lambda x: fa2.attention_backward(x, _Q, _K, _V, _Q, _Q[..., 0]),
    "attention_backward lse": lambda x: fa2.attention_backward(_Q, _Q, _K, _V, _Q, x),
    "cu_seqlens": lambda x: fa2.attention_forward(
        _Q[0], _K[0], _V[0], layout="thd", cu_seqlens_q=x, cu_seqlens_k=x),
    "torch.attention q": lambda x: fa2_cpu.torch.attention(x, _K, _V),
    "torch.attention v": lambda x: fa2_cpu.torch.attention(_Q, _K, x),
    "torch.sdpa key": lambda x: fa2_cpu.torch.scaled_dot_product_attention(_Q, x, _V),
    "softmax": fa2.softmax,
    "softmax_backward": lambda x: fa2.softmax_backward(x, _Q),
    "rms_norm": lambda x: fa2.rms_norm(x, x),
    "rms_norm_backward": lambda x: fa2.rms_norm_backward(x, _Q, _Q[0, 0, 0]),
    "cross_entropy": lambda x: fa2.cross_entropy(x, x),
    "embedding_backward": lambda x: fa2.embedding_backward(x, x, 3),
    "causal_attention_backward": lambda x: fa2.causal_attention_backward(x, x, x, x, 3, 3),
}  # fmt: skip
# A row of numbers is an argument like another for what works by rows.
ALLOWED = {("softmax", "float64 among float32"), ("softmax", "rank 1"), ("softmax", "rank 0"), ("rms_norm", "rank 1")}


@pytest.mark.parametrize("call", CALLS)
def test_arguments_that_are_no_array(call):
    for kind, make in BAD.items():
        if (call, kind) in ALLOWED:
            continue
        with pytest.raises((TypeError, ValueError)) as caught:
            CALLS[call](make())
        sentence = str(caught.value)
        assert len(sentence) > 20 and "incompatible function arguments" not in sentence, (kind, sentence)


@pytest.mark.parametrize("name", ("bias", "alibi_slopes", "sinks"))
def test_optional_arguments_that_are_no_array(name):
    for kind, make in BAD.items():
        if kind in ("None", "float64 among float32") or (name == "bias" and kind.startswith("rank")):
            continue
        for function in (fa2.attention_forward, fa2_cpu.torch.attention):
            with pytest.raises((TypeError, ValueError), match=name):
                function(_Q, _K, _V, **{name: make()})


OPTIONS = (
    dict(scale="a"), dict(softcap="x"), dict(window=3), dict(window=(1.5, 2)), dict(window=("a", 0)),
    dict(window=(1 << 70, 0)), dict(causal=1), dict(causal="diagonal"), dict(layout=3), dict(layout="bsdh"),
    dict(dropout_p="a"), dict(precision=3), dict(precision="best"),
)  # fmt: skip


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_options_of_the_wrong_kind(options):
    for function in (fa2.attention_forward, fa2.reference.attention_forward, fa2_cpu.torch.attention):
        with pytest.raises((TypeError, ValueError)) as caught:
            function(_Q, _K, _V, **options)
        assert next(iter(options)) in str(caught.value)


def test_mixed_dtypes_are_one_type_of_error():
    k = _K.double()
    for call in (
        lambda: fa2.attention_forward(_Q, k, _V),
        lambda: fa2.attention_forward(_Q.numpy(), k.numpy(), _V.numpy()),
        lambda: fa2.attention_backward(_Q, _Q, k, _V, _Q, _Q[..., 0]),
        lambda: fa2.reference.attention_forward(_Q, k, _V),
        lambda: fa2_cpu.torch.attention(_Q, k, _V),
        lambda: fa2_cpu.torch.scaled_dot_product_attention(_Q, k, _V),
        lambda: fa2.softmax_backward(_Q, k),
    ):
        with pytest.raises(TypeError, match="one dtype"):
            call()


def test_fewer_heads_need_enable_gqa():
    with pytest.raises(ValueError, match="4 heads.*2.*enable_gqa=True"):
        fa2_cpu.torch.scaled_dot_product_attention(_Q, _K[:, :2], _V[:, :2])


def test_packed_rows_need_cu_seqlens():
    packed = [x[0].transpose(0, 1).contiguous() for x in (_Q, _K, _V)]
    starts = torch.tensor([0, 7, 19], dtype=torch.int32)
    for function in (fa2.attention_forward, fa2.reference.attention_forward, fa2_cpu.torch.attention):
        for given in ({}, dict(cu_seqlens_q=starts), dict(cu_seqlens_k=starts)):
            with pytest.raises(ValueError, match="cu_seqlens"):
                function(*packed, layout="thd", **given)


def test_tensors_that_require_grad_are_refused_where_no_gradient_follows():
    q = _Q.clone().requires_grad_()
    targets = torch.zeros(SHAPE[:3], dtype=torch.int64)
    for name, call in (
        ("attention", lambda: fa2.attention_forward(q, _K, _V)),
        ("attention", lambda: fa2.attention_backward(_Q, _Q, q, _V, _Q, _Q[..., 0])),
        ("attention", lambda: fa2.attention_backward(q, _Q, _K, _V, _Q, _Q[..., 0])),
        ("attention", lambda: fa2.reference.attention_forward(_Q, q, _V)),
        ("attention", lambda: fa2.reference.attention_backward(q, _Q, _K, _V, _Q, _Q[..., 0])),
        ("softmax", lambda: fa2.softmax(q)),
        ("softmax", lambda: fa2.softmax_backward(_Q, q)),
        ("rms_norm", lambda: fa2.rms_norm(_Q, torch.ones(8, requires_grad=True))),
        ("rms_norm", lambda: fa2.rms_norm_backward(q, _Q, torch.ones(8))),
        ("embedding", lambda: fa2.embedding_backward(q, targets, 3)),
        ("causal_attention", lambda: fa2.causal_attention_backward(_Q[0, 0], _Q[0, 0], _Q[0, 0], q[0, 0], 1, 1)),
        ("cross_entropy", lambda: fa2.cross_entropy(q, targets)),
    ):
        with pytest.raises(TypeError, match=f"requires grad.*fa2_cpu.torch.{name}"):
            call()
        with torch.no_grad():
            call()


def test_negative_bit():
    negative = torch.complex(_Q, _Q).conj().imag
    assert negative.is_neg()
    torch.testing.assert_close(fa2.attention_forward(negative, _K, _V)[0], fa2.attention_forward(-_Q, _K, _V)[0])
    for function in (fa2_cpu.torch.scaled_dot_product_attention, lambda *x: fa2_cpu.torch.attention(*x)[0]):
        torch.testing.assert_close(function(negative, _K, _V), function(-_Q, _K, _V))
    out, lse = fa2.attention_forward(_Q, _K, _V)
    got = fa2.attention_backward(negative, _Q, _K, _V, out, lse)
    torch.testing.assert_close(got.dq, fa2.attention_backward(-_Q, _Q, _K, _V, out, lse).dq)
    torch.testing.assert_close(fa2.softmax(negative), fa2.softmax(-_Q))
