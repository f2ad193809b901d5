#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Makes the virtual environment of the Python tests: what builds fa2's package, and PyTorch from PyPI (5.4 GB on disk).
# What is installed already is kept. Where PyTorch cannot be installed it says so, loudly, and fails if FA2_NEED_TORCH is set.
# Environment: as scripts/test_python.sh.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
venv=${FA2_VENV:-build-python/venv}

scripts/install_deps.sh build python
[[ -x "$venv/bin/pip" ]] || "${FA2_PYTHON:-python3}" -m venv "$venv"
pip=("$venv/bin/pip" --disable-pip-version-check -q)

# ${FA2_PYTHON_PACKAGES} is a list of words.
# shellcheck disable=SC2086
"${pip[@]}" install numpy ml_dtypes pytest pytest-xdist hypothesis setuptools scikit-build-core nanobind ${FA2_PYTHON_PACKAGES:-}
if ! "$venv/bin/python" -c 'import torch' 2>/dev/null && ! "${pip[@]}" install torch; then
  printf '%s\n' "" "!!! PyTorch cannot be installed: NONE of fa2's PyTorch and flash-attn tests run !!!" "" >&2
  if [[ -n "${FA2_NEED_TORCH:-}" ]]; then exit 1; fi
fi
