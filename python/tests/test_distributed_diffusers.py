# SPDX-License-Identifier: Apache-2.0
"""diffusers' "flash" backend through the flash_attn alias: alone, by ring and by Ulysses. Skipped without diffusers."""

import importlib.util

import pytest

torch = pytest.importorskip("torch")
dist = pytest.importorskip("torch.distributed")
if not dist.is_available() or not dist.is_gloo_available():
    pytest.skip("PyTorch has no gloo", allow_module_level=True)
if importlib.util.find_spec("diffusers") is None:
    pytest.skip("diffusers is not installed", allow_module_level=True)

import fa2_cpu.flash_attn
from conftest import BOUNDS
from ranks import Ranks

B, N, H, D = 2, 16, 4, 8


@pytest.fixture(scope="module")
def two():
    ranks = Ranks(2)
    yield ranks
    ranks.close()


@pytest.fixture(scope="module")
def four():
    ranks = Ranks(4)
    yield ranks
    ranks.close()


def dispatcher():
    """diffusers looks for flash-attn while it is imported."""
    fa2_cpu.flash_attn.install_as_flash_attn(metadata=True)
    from diffusers.models import attention_dispatch

    return attention_dispatch


def tensors(kv_rows=N):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(B, n, H, D, generator=generator).bfloat16() for n in (N, kv_rows, kv_rows, N)]


def relative_error(x, expected):
    x, expected = x.detach().double(), expected.detach().double()
    return float((x - expected).norm() / expected.norm())


def alone(rank, world, kv_rows, options):
    """Relative errors of the flash backend, on each rank by itself, from the native one in f64."""
    dispatch = dispatcher().dispatch_attention_fn
    *leaves, dout = tensors(kv_rows)
    exact = [x.double().requires_grad_() for x in leaves]
    leaves = [x.requires_grad_() for x in leaves]
    expected = dispatch(*exact, **options, backend="native")
    out = dispatch(*leaves, **options, backend="flash")
    grads = torch.autograd.grad(out, leaves, dout)
    wanted = torch.autograd.grad(expected, exact, dout.double())
    return [relative_error(x, e) for x, e in zip((out, *grads), (expected, *wanted))]


@pytest.mark.parametrize("kv_rows, options", [(N, {}), (N, dict(is_causal=True)), (21, dict(scale=0.2))])
def test_backend(two, kv_rows, options):
    for errors in two.run(alone, kv_rows, options):
        assert max(errors) <= BOUNDS["bfloat16"], errors


def transformer(rank, world):
    """A FLUX transformer on "flash" and on "native", in bf16."""
    from_backend = dispatcher().attention_backend
    from diffusers import FluxTransformer2DModel

    torch.manual_seed(0)
    model = FluxTransformer2DModel(
        patch_size=1, in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=32, pooled_projection_dim=32, axes_dims_rope=(4, 4, 8),
    ).bfloat16()  # fmt: skip
    inputs = dict(
        hidden_states=torch.randn(1, 16, 4).bfloat16(), encoder_hidden_states=torch.randn(1, 8, 32).bfloat16(),
        pooled_projections=torch.randn(1, 32).bfloat16(), timestep=torch.tensor([0.5]).bfloat16(),
        img_ids=torch.zeros(16, 3), txt_ids=torch.zeros(8, 3),
    )  # fmt: skip
    results = []
    for backend in ("native", "flash"):
        with from_backend(backend):
            out = model(**inputs).sample
        (grad,) = torch.autograd.grad(out.float().square().sum(), model.x_embedder.weight)
        results.append((out, grad))
    native, flash = results
    return [relative_error(x, e) for x, e in zip(flash, native)]


def test_a_transformer(two):
    # Both sides are bf16 through four layers' roundings.
    for errors in two.run(transformer):
        assert max(errors) <= 5 * BOUNDS["bfloat16"], errors


def parallel(rank, world, ring, ulysses):
    dispatch = dispatcher()
    from diffusers import ContextParallelConfig
    from diffusers.models._modeling_parallel import ParallelConfig

    mesh = dist.init_device_mesh("cpu", (ring, ulysses), mesh_dim_names=("ring", "ulysses"))
    config = ParallelConfig(context_parallel_config=ContextParallelConfig(ring_degree=ring, ulysses_degree=ulysses))
    config.setup(rank, world, torch.device("cpu"), mesh=mesh)
    *inputs, dout = tensors()
    exact = [x.double().requires_grad_() for x in inputs]
    expected = dispatch.dispatch_attention_fn(*exact, backend="native")
    wanted = torch.autograd.grad(expected, exact, dout.double())
    part = lambda x: x.detach().chunk(world, 1)[rank].contiguous()
    own = [part(x).requires_grad_() for x in inputs]
    out = dispatch.dispatch_attention_fn(*own, backend="flash", parallel_config=config)
    grads = torch.autograd.grad(out, own, part(dout))
    return [relative_error(x, part(e)) for x, e in zip((out, *grads), (expected, *wanted))]


@pytest.mark.parametrize("ring, ulysses", [(2, 1), (1, 2)])
def test_context_parallel(two, ring, ulysses):
    for errors in two.run(parallel, ring, ulysses):
        assert max(errors) <= 3 * BOUNDS["bfloat16"], errors


def test_ring_of_ulysses(four):
    for errors in four.run(parallel, 2, 2):
        assert max(errors) <= 3 * BOUNDS["bfloat16"], errors


def refused(rank, world, dtype, options):
    dispatch = dispatcher()
    q, k, v, _ = (x.to(dtype) for x in tensors())
    dispatch._AttentionBackendRegistry._checks_enabled = True
    dispatch.dispatch_attention_fn(q, k, v, backend="flash", **options)


def test_masks_are_refused(two):
    for _, sentence in two.refusals(refused, torch.bfloat16, dict(attn_mask=torch.ones(B, 1, N, N, dtype=torch.bool))):
        assert "`attn_mask` is not supported for flash-attn 2" in sentence
