# SPDX-License-Identifier: Apache-2.0
"""Plants wrong includes in a copy of the sources and looks for what scripts/check_layers.py says of them."""
import pathlib
import shutil
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[2]

# File, the include planted at its end, and what the check must say: words of the one line that it prints.
PLANTED = [
    ("src/simd/engine.h", "src/attention/call/problem.h", "src/simd includes src/attention/call/problem.h"),
    ("src/simd/lane/pack-inl.h", "src/threading/team.h", "src/threading is above it"),
    ("src/common/integers.h", "src/platform/cores.h", "src/common includes src/platform/cores.h"),
    ("src/attention/forward/forward.cc", "src/attention/backward/backward.h", "beside it, in the same layer"),
    ("src/attention/call/problem.h", "src/attention/schedule/blocks.h", "src/attention/schedule is above it"),
    ("include/fa2/types.h", "src/common/half.h", "include/fa2 includes src/common/half.h"),
    ("src/simd/math/load-inl.h", "src/simd/engines.h", "src/simd/engines is above it"),
    ("src/ops/rows.h", "src/elsewhere/file.h", "src/elsewhere: has no layer"),
]


def run_check(root):
    return subprocess.run([sys.executable, ROOT / "scripts/check_layers.py", root], capture_output=True, text=True,
                          check=False)


def main():
    failures = []
    with tempfile.TemporaryDirectory() as folder:
        copy = pathlib.Path(folder)
        for top in ("include", "src"):
            shutil.copytree(ROOT / top, copy / top)
        clean = run_check(copy)
        if clean.returncode != 0:
            failures.append(f"without a wrong include: {clean.stdout}{clean.stderr}")
        for name, include, message in PLANTED:
            file = copy / name
            before = file.read_text(encoding="utf-8")
            file.write_text(f'{before}#include "{include}"\n', encoding="utf-8")
            result = run_check(copy)
            lines = result.stdout.splitlines()
            if result.returncode != 1 or len(lines) != 1 or message not in lines[0]:
                failures.append(f"{name} with {include}: status {result.returncode}, {result.stdout}{result.stderr}")
            file.write_text(before, encoding="utf-8")
    print("\n".join(failures) if failures else f"{len(PLANTED)} wrong includes are found")
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
