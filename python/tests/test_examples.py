# SPDX-License-Identifier: Apache-2.0
"""The scripts of examples/python run as a user runs them; each checks its own results."""

import importlib.util
import pathlib
import subprocess
import sys

import pytest

EXAMPLES = pathlib.Path(__file__).resolve().parents[2] / "examples" / "python"
NEEDS = {
    "numpy_training": (),
    "gradient_mistakes": (),
    "pytorch_training": ("torch",),
    "flash_attn_code": ("torch",),
    "flex_patterns": ("torch",),
    "transformers_training": ("torch", "transformers"),
    "jax_training": ("jax",),
    "long_context": ("torch", "transformers"),
}
# torchrun, as a module of the interpreter that runs the tests.
LAUNCHERS = {"long_context": ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")}


def test_every_example_is_run():
    assert {path.stem for path in EXAMPLES.glob("*.py")} == set(NEEDS)


@pytest.mark.parametrize("name", NEEDS)
def test_example(name):
    for module in NEEDS[name]:
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"{module} is not installed")
    subprocess.run([sys.executable, *LAUNCHERS.get(name, ()), str(EXAMPLES / f"{name}.py")], check=True, timeout=300)
