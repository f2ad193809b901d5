# SPDX-License-Identifier: Apache-2.0
"""How XLA calls fa2: by its foreign function interface and by a callback, mapped, rematerialized, on two devices.

The expected values are those of the float64 reference.
"""

import os
import re
import subprocess
import sys

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import numpy as np  # noqa: E402
import pytest  # noqa: E402

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402

import fa2_cpu as fa2  # noqa: E402
import fa2_cpu.jax  # noqa: E402
from conftest import BOUNDS, relative_l2  # noqa: E402
from fa2_cpu import _core, _jax_calls  # noqa: E402
from fa2_cpu.jax import dot_product_attention  # noqa: E402

HAS_FFI = hasattr(_core, "xla_ffi_version") and hasattr(jax, "ffi")


@pytest.fixture(params=["ffi", "callback"])
def way(request, monkeypatch):
    """Both ways, whatever the environment says."""
    if request.param == "ffi" and not HAS_FFI:
        pytest.skip("this build has no FFI handlers")

    def clear():
        _jax_calls.call_way.cache_clear()
        _jax_calls._forward_of.cache_clear()
        _jax_calls._backward_of.cache_clear()
        jax.clear_caches()

    monkeypatch.setenv("FA2_JAX", request.param)
    clear()
    yield request.param
    monkeypatch.undo()
    clear()


def _arrays(rng, *shapes, dtype=jnp.float32):
    return [jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes]


def _calls(function, *arguments):
    """How often the compiled function leaves XLA."""
    text = jax.jit(function).lower(*arguments).compile().as_text()
    return len(re.findall(r'custom_call_target="(fa2_attention_|\w*callback)', text))


def _traced_calls(function, *arguments):
    """How often it does before XLA merges what is computed twice."""

    def count(jaxpr):
        here = sum(e.primitive.name in ("ffi_call", "pure_callback") for e in jaxpr.eqns)
        values = [x for e in jaxpr.eqns for x in jax.tree.leaves(list(e.params.values()))]
        return here + sum(count(getattr(x, "jaxpr", x)) for x in values if hasattr(x, "jaxpr") or hasattr(x, "eqns"))

    return count(jax.make_jaxpr(function)(*arguments).jaxpr)


def test_the_way_is_the_one_wanted(way):
    chosen, why = fa2_cpu.jax.call_way()
    assert chosen == way and (why is None) == (way == "ffi")
    q, k, v = (jnp.ones((1, 5, 2, 8)) for _ in range(3))
    lowered = jax.jit(dot_product_attention).lower(q, k, v).as_text()
    assert ("fa2_attention_forward" in lowered) == (way == "ffi")
    assert ("callback" in lowered) == (way == "callback")


def test_an_unknown_way_is_refused(monkeypatch):
    monkeypatch.setenv("FA2_JAX", "pigeon")
    _jax_calls.call_way.cache_clear()
    with pytest.raises(ValueError, match='FA2_JAX is "pigeon"; it must be'):
        fa2_cpu.jax.call_way()
    _jax_calls.call_way.cache_clear()


def test_headers_of_another_version_lead_to_the_callback(monkeypatch):
    """What jaxlib says when it does not take the handlers' version is passed on."""

    def refuse(*args, **kwargs):
        raise RuntimeError("the handler's API version (0.1) is incompatible with (9.9)")

    if not HAS_FFI:
        pytest.skip("this build has no FFI handlers")
    monkeypatch.delenv("FA2_JAX", raising=False)
    monkeypatch.setattr(jax.ffi, "register_ffi_target", refuse)
    _jax_calls.call_way.cache_clear()
    assert fa2_cpu.jax.call_way() == ("callback", "the handler's API version (0.1) is incompatible with (9.9)")
    monkeypatch.setenv("FA2_JAX", "ffi")
    _jax_calls.call_way.cache_clear()
    with pytest.raises(RuntimeError, match='FA2_JAX is "ffi", but the handler'):
        fa2_cpu.jax.call_way()
    _jax_calls.call_way.cache_clear()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
def test_gradients_against_float64(rng, way, dtype):
    with jax.enable_x64(dtype == "float64"):
        q, k, v, dout = _arrays(rng, (2, 19, 4, 16), (2, 23, 2, 16), (2, 23, 2, 8), (2, 19, 4, 8), dtype=dtype)
        (bias,) = _arrays(rng, (1, 4, 19, 23), dtype=dtype)
        out, pullback = jax.jit(
            lambda *x: jax.vjp(lambda *y: dot_product_attention(*y, is_causal=True, scale=0.3), *x)
        )(q, k, v, bias)
        grads = pullback(dout)
        options = dict(layout="bshd", causal="top_left", scale=0.3, bias=bias)
        expected, lse = fa2.reference.attention_forward(q, k, v, **options)
        wanted = fa2.reference.attention_backward(dout, q, k, v, expected, lse, want_dbias=True, **options)
        assert out.dtype == dtype and relative_l2(out, expected) <= BOUNDS[dtype]
        for got, want in zip(grads, (wanted.dq, wanted.dk, wanted.dv, wanted.dbias)):
            assert got.dtype == dtype and relative_l2(got, want) <= BOUNDS[dtype]


def test_both_ways_give_the_same_bits(rng, monkeypatch):
    if not HAS_FFI:
        pytest.skip("this build has no FFI handlers")
    q, k, v = _arrays(rng, (2, 67, 4, 16), (2, 67, 2, 16), (2, 67, 2, 16), dtype=jnp.bfloat16)
    results = []
    for way in ("ffi", "callback"):
        monkeypatch.setenv("FA2_JAX", way)
        for cache in (_jax_calls.call_way, _jax_calls._forward_of, _jax_calls._backward_of):
            cache.cache_clear()
        jax.clear_caches()
        out, pullback = jax.vjp(lambda *x: dot_product_attention(*x, local_window_size=9), q, k, v)
        results.append((out, *pullback(out)))
    for a, b in zip(*results):
        np.testing.assert_array_equal(np.asarray(a).view(np.uint16), np.asarray(b).view(np.uint16))
    monkeypatch.undo()
    _jax_calls.call_way.cache_clear()


# What is mapped of query, key, value and bias, and the batches of bias.
MAPPED = {
    "all": ((0, 0, 0, 0), 2),
    "all, one bias": ((0, 0, 0, 0), 1),
    "shared bias": ((0, 0, 0, None), 1),
    "shared bias of each sequence": ((0, 0, 0, None), 2),
    "queries": ((0, None, None, None), 1),
    "keys, last axis": ((None, 4, 4, None), 2),
    "bias": ((None, None, None, 0), 1),
}


@pytest.mark.parametrize("axes, batches", MAPPED.values(), ids=MAPPED.keys())
def test_vmap_is_one_call(rng, way, axes, batches):
    shapes = [(2, 19, 4, 16), (2, 23, 2, 16), (2, 23, 2, 16), (batches, 4, 19, 23)]
    arrays = [
        jnp.asarray(rng.standard_normal(s if a is None else (*s[:a], 3, *s[a:])), jnp.float32)
        for s, a in zip(shapes, axes)
    ]
    (weights,) = _arrays(rng, (2, 19, 4, 16))

    def gradients(q, k, v, bias):
        def loss(q, k, v, bias):
            out = dot_product_attention(q, k, v, bias)
            return (out * weights).sum(), out

        return jax.grad(loss, (0, 1, 2, 3), has_aux=True)(q, k, v, bias)

    mapped = jax.vmap(gradients, axes)
    assert _calls(mapped, *arrays) == 2
    grads, out = jax.jit(mapped)(*arrays)
    for i in range(3):
        one = [x if a is None else x.take(i, a) for x, a in zip(arrays, axes)]
        one_grads, one_out = gradients(*one)
        assert relative_l2(out[i], one_out) <= 3e-6
        for got, want in zip(grads, one_grads):
            assert got[i].shape == want.shape and relative_l2(got[i], want) <= 3e-6


def test_gradient_of_a_mapped_function(rng, way):
    """What is shared gets the sum of the gradients; two maps, one inside the other."""
    q, k, v = _arrays(rng, (3, 5, 2, 7, 2, 8), (2, 9, 2, 8), (2, 9, 2, 8))
    (bias,) = _arrays(rng, (1, 2, 7, 9))

    def mapped(q, k, v, bias):
        inner = jax.vmap(dot_product_attention, (0, None, None, None))
        return jax.vmap(inner, (0, None, None, None))(q, k, v, bias)

    def one_by_one(q, k, v, bias):
        return jnp.stack([jnp.stack([jax.nn.dot_product_attention(y, k, v, bias) for y in x]) for x in q])

    def loss(function):
        return lambda *x: (function(*x) ** 2).sum()

    assert relative_l2(mapped(q, k, v, bias), one_by_one(q, k, v, bias)) <= 3e-6
    got = jax.grad(loss(mapped), (0, 1, 2, 3))(q, k, v, bias)
    want = jax.grad(loss(one_by_one), (0, 1, 2, 3))(q, k, v, bias)
    for a, b in zip(got, want):
        assert a.shape == b.shape and relative_l2(a, b) <= 1e-5


def test_boolean_mask_mapped(rng, way):
    q, k, v = _arrays(rng, (3, 2, 19, 4, 16), (3, 2, 23, 2, 16), (3, 2, 23, 2, 16))
    lengths = jnp.array([[23, 4], [11, 1], [7, 19]])

    def attention(function):
        return jax.vmap(lambda q, k, v, n: function(q, k, v, key_value_seq_lengths=n))

    assert relative_l2(attention(dot_product_attention)(q, k, v, lengths),
                       attention(jax.nn.dot_product_attention)(q, k, v, lengths)) <= 3e-6  # fmt: skip


def test_remat(rng, way):
    q, k, v = _arrays(rng, (2, 19, 4, 16), (2, 19, 2, 16), (2, 19, 2, 16))

    def loss(q, k, v):
        return (dot_product_attention(jnp.sin(q), k, v, is_causal=True) ** 2).sum()

    plain = jax.jit(jax.grad(loss, (0, 1, 2)))(q, k, v)
    again = jax.jit(jax.grad(jax.checkpoint(loss), (0, 1, 2)))(q, k, v)
    for a, b in zip(again, plain):
        np.testing.assert_array_equal(a, b)
    assert _traced_calls(jax.value_and_grad(loss), q, k, v) == 2
    assert _traced_calls(jax.value_and_grad(jax.checkpoint(loss)), q, k, v) == 3


def test_scan_and_sizes_of_zero(rng, way):
    q, k, v = _arrays(rng, (2, 19, 2, 8), (2, 19, 2, 8), (2, 19, 2, 8))

    def layer(q, _):
        return dot_product_attention(q, k, v), None

    chained, _ = jax.lax.scan(layer, q, None, length=3)
    expected = q
    for _ in range(3):
        expected = jax.nn.dot_product_attention(expected, k, v)
    assert relative_l2(chained, expected) <= 3e-6
    assert dot_product_attention(q[:0], k[:0], v[:0]).shape == (0, 19, 2, 8)
    assert not dot_product_attention(q, k[:, :0], v[:, :0]).any()


TWO_DEVICES = """
import jax, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
import fa2_cpu.jax
assert len(jax.devices()) == 2
mesh = Mesh(np.array(jax.devices()), ("batch",))
q, k, v = (jax.random.normal(jax.random.key(i), (4, 65, 2, 16)) for i in range(3))

def gradients(q, k, v):
    return jax.grad(lambda *x: (fa2_cpu.jax.dot_product_attention(*x) ** 2).sum(), (0, 1, 2))(q, k, v)

expected = jax.jit(gradients)(q, k, v)
placed = [jax.device_put(x, NamedSharding(mesh, P("batch"))) for x in (q, k, v)]
split = jax.jit(jax.shard_map(gradients, mesh=mesh, in_specs=P("batch"), out_specs=P("batch"), check_vma=False))
on_the_second = jax.jit(gradients)(*(jax.device_put(x, jax.devices()[1]) for x in (q, k, v)))
for got in (split(*placed), jax.jit(gradients)(*placed), on_the_second):
    for a, b in zip(got, expected):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)
print("all alike", fa2_cpu.jax.call_way()[0])
"""


def test_two_devices(way):
    environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=2", "FA2_JAX": way}
    run = subprocess.run(
        [sys.executable, "-c", TWO_DEVICES], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, timeout=300,
    )  # fmt: skip
    assert run.returncode == 0 and f"all alike {way}" in run.stdout, run.stdout


def test_calls_from_threads_at_once(rng, way):
    import concurrent.futures

    q, k, v = _arrays(rng, (2, 65, 4, 16), (2, 65, 4, 16), (2, 65, 4, 16))
    function = jax.jit(dot_product_attention)
    expected = np.asarray(function(q, k, v))
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        for out in pool.map(lambda _: np.asarray(function(q, k, v)), range(16)):
            np.testing.assert_array_equal(out, expected)
