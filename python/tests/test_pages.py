# SPDX-License-Identifier: Apache-2.0
"""The Python of README.md and docs/*.md runs as a reader pastes it: the blocks of a page, one after another.

A block that needs what the page does not show is ```python title="excerpt", and is not run.
"""

import importlib.util
import pathlib
import re
import subprocess
import sys

import pytest

from fa2_cpu import _core

ROOT = pathlib.Path(__file__).resolve().parents[2]
NEEDS = {
    "README.md": ("torch",),
    "docs/check_gpu_port.md": ("torch", "jax"),
    "docs/distributed.md": ("torch", "transformers"),
    "docs/flex_attention.md": ("torch",),
    "docs/python.md": ("ml_dtypes", "torch", "transformers", "jax"),
}
# torchrun, as a module of the interpreter that runs the tests.
LAUNCHERS = {"docs/distributed.md": ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")}
EXCERPT = 'python title="excerpt"'
# Tests that a page shows are called too.
CALL_TESTS = '\nfor name in [name for name in dir() if name.startswith("test_")]:\n    globals()[name]()\n'


def _languages(page):
    """What follows the three backticks that begin each block."""
    return re.findall(r"^ *```(.*)$", (ROOT / page).read_text(encoding="utf-8"), re.MULTILINE)[::2]


def _script(page):
    """The blocks of a page on the lines that they have there, so that an error names the page's line."""
    lines, inside = [], False
    for line in (ROOT / page).read_text(encoding="utf-8").splitlines():
        fence = line.startswith("```")
        inside = (line == "```python") if fence else inside
        lines.append(line if inside and not fence else "")
    return "\n".join(lines) + CALL_TESTS


def test_every_page_is_run():
    pages = ["README.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))]
    languages = {page: _languages(page) for page in pages}
    assert {page for page in pages if "python" in languages[page]} == set(NEEDS)
    unknown = {x for found in languages.values() for x in found if x.startswith("py")} - {"python", EXCERPT}
    assert unknown == set()


@pytest.mark.parametrize("page", NEEDS)
def test_page(page, tmp_path):
    for module in NEEDS[page]:
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"{module} is not installed")
    if page == "docs/check_gpu_port.md" and not hasattr(_core, "verify"):
        pytest.skip("this build has no checker")
    if page == "docs/python.md":
        import torch.nn.attention

        if not hasattr(torch.nn.attention, "activate_flash_attention_impl"):
            pytest.skip("this PyTorch has no registry of flash attention implementations")
    script = tmp_path / "page.py"
    script.write_text(_script(page), encoding="utf-8")
    subprocess.run([sys.executable, *LAUNCHERS.get(page, ()), script.name], check=True, timeout=300, cwd=tmp_path)
