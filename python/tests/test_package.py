# SPDX-License-Identifier: Apache-2.0
"""The installed package: it carries its shared libraries, types and version, and imports nothing it need not."""

import os
import pathlib
import subprocess
import sys

import pytest

import fa2_cpu as fa2

HERE = pathlib.Path(fa2.__file__).parent
INSTALLED = (HERE / "_core.pyi").exists()


@pytest.mark.skipif(not INSTALLED, reason="a source tree, not an installed package")
def test_shared_libraries_come_along():
    """oneTBB and its allocator are loaded from the package, as they must be on a machine that has none."""
    code = """
import numpy, fa2_cpu as fa2
q = numpy.ones((1, 4, 512, 64), numpy.float32)
fa2.attention_forward(q, q, q, num_threads=2)
print("\\n".join({line.split()[-1] for line in open("/proc/self/maps") if "libtbb" in line or "libhwy" in line}))
"""
    loaded = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()
    for library in ("libtbb.so", "libtbbmalloc.so"):
        assert any(library in path for path in loaded), library
    assert all(pathlib.Path(path).is_relative_to(HERE) for path in loaded), loaded


# Hides the system's copies behind an empty file, in a mount namespace that ends with the process.
HIDE_SYSTEM_LIBRARIES = """
for library in $(ldconfig -p | awk '/libtbb|libhwy/ { print $NF }'); do
  mount --bind /dev/null "$(realpath "$library")" || exit 77
done
exec "$@"
"""


@pytest.mark.skipif(not INSTALLED, reason="a source tree, not an installed package")
def test_runs_on_a_machine_without_its_shared_libraries():
    code = """
import ctypes, numpy
try:
    ctypes.CDLL("libtbb.so.12")
except OSError:
    import fa2_cpu as fa2
    assert fa2.transpose_2d(numpy.ones((2, 3), numpy.float32)).shape == (3, 2)
    print("ran")
"""
    shell = ["sh", "-c", HIDE_SYSTEM_LIBRARIES, "sh", sys.executable, "-c", code]
    try:
        run = subprocess.run(["unshare", "--map-root-user", "--mount", *shell], capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("no unshare")
    if run.returncode == 77 or "unshare:" in run.stderr:
        pytest.skip("no mount namespaces here")
    assert run.stdout.strip() == "ran", run.stderr


@pytest.mark.skipif(not INSTALLED, reason="a source tree, not an installed package")
def test_types_come_along():
    assert (HERE / "py.typed").exists()
    assert "def attention_forward" in (HERE / "_core.pyi").read_text()


def test_imports_are_lazy():
    code = "import sys, fa2_cpu; print([m for m in ('torch', 'jax', 'transformers', 'ml_dtypes') if m in sys.modules])"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"


def test_works_beside_the_package_called_fa2(tmp_path):
    """ForceAtlas2 owns the import name fa2, and has a compiled fa2.fa2util as well."""
    (tmp_path / "fa2").mkdir()
    (tmp_path / "fa2" / "__init__.py").write_text("from .forceatlas2 import ForceAtlas2\n")
    (tmp_path / "fa2" / "forceatlas2.py").write_text("class ForceAtlas2:\n    pass\n")
    code = """
import sys
sys.path.insert(0, sys.argv[1])
import numpy
from fa2 import ForceAtlas2
import fa2_cpu
assert sys.modules["fa2"].ForceAtlas2 is ForceAtlas2
q = numpy.ones((1, 1, 4, 8), numpy.float32)
assert fa2_cpu.attention_forward(q, q, q)[0].shape == q.shape
try:
    import torch
except ImportError:
    pass
else:
    import fa2_cpu.torch, fa2_cpu.flash_attn
    q = torch.ones(1, 1, 4, 8)
    assert fa2_cpu.torch.scaled_dot_product_attention(q, q, q).equal(q)
import fa2
assert not hasattr(fa2, "attention_forward")
print("ran")
"""
    run = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True)
    assert run.stdout.strip() == "ran", run.stderr


def test_public_names_are_documented():
    for name in fa2.__all__:
        if name != "__version__":
            assert getattr(fa2, name).__doc__, name


def test_verbose_prints_a_line_a_call():
    code = """
import numpy, fa2_cpu as fa2
q, k = numpy.ones((2, 4, 16, 8), numpy.float32), numpy.ones((2, 2, 24, 8), numpy.float32)
out, lse = fa2.attention_forward(q, k, k, num_threads=1)
fa2.attention_backward(out, q, k, k, out, lse, num_threads=1)
"""
    quiet = {name: value for name, value in os.environ.items() if name != "FA2_VERBOSE"}
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={**quiet, "FA2_VERBOSE": "1"})
    lines = [line.split(",") for line in run.stderr.splitlines() if line.startswith("fa2,")]
    assert [line[1] for line in lines] == ["attention_forward", "attention_backward"], run.stderr
    for _, _, shape, dtype, engine, threads, pool, milliseconds, gflops in lines:
        assert shape == "B2 Hq4 Hkv2 Nq16 Nk24 D8 Dv8" and dtype == "f32"
        assert engine and pool and threads == "1" and float(milliseconds) > 0 and float(gflops) > 0
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=quiet).stderr == ""


def test_verbose_prints_training_kernels_too():
    code = """
import numpy, fa2_cpu as fa2
x = numpy.ones((3, 8), numpy.float32)
fa2.softmax(x)
fa2.rms_norm_backward(x, x, numpy.ones(8, numpy.float32))
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, "FA2_VERBOSE": "1"})
    lines = [line.split(",") for line in run.stderr.splitlines() if line.startswith("fa2,")]
    assert [line[1] for line in lines] == ["softmax", "rms_norm_backward"], run.stderr
    for _, _, shape, dtype, target, threads, pool, milliseconds, gflops in lines:
        assert shape == "1x1x3x8" and dtype == "f32" and target == fa2.info()["target"]
        assert int(threads) > 0 and pool and float(milliseconds) > 0 and gflops == ""
