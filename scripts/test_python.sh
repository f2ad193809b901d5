#!/usr/bin/env bash
# Installs the Python package into a virtual environment with PyTorch from PyPI and runs python/tests.
#   scripts/test_python.sh [pytest arguments...]
# What is installed already is kept, so a second run only rebuilds fa2. PyTorch takes 5.4 GB on disk; where it
# cannot be installed its tests are left out, loudly, unless FA2_NEED_TORCH is set.
# Environment: FA2_PYTHON (default: python3), FA2_VENV (default: build-python/venv), FA2_PYTHON_PACKAGES
# (more packages to install, for tests that are skipped without them), FA2_NEED_TORCH (1: fail without PyTorch).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
venv=${FA2_VENV:-build-python/venv}

scripts/install_deps.sh build python
[[ -x "$venv/bin/pip" ]] || "${FA2_PYTHON:-python3}" -m venv "$venv"
pip=("$venv/bin/pip" --disable-pip-version-check -q)

# ${FA2_PYTHON_PACKAGES} is a list of words.
# shellcheck disable=SC2086
"${pip[@]}" install numpy ml_dtypes pytest setuptools scikit-build-core nanobind ${FA2_PYTHON_PACKAGES:-}
if ! "$venv/bin/python" -c 'import torch' 2>/dev/null && ! "${pip[@]}" install torch; then
  printf '%s\n' "" "!!! PyTorch cannot be installed: NONE of fa2's PyTorch and flash-attn tests run !!!" "" >&2
  if [[ -n "${FA2_NEED_TORCH:-}" ]]; then exit 1; fi
fi
# The build backend is in the environment, so that the build folder stays valid from run to run.
"${pip[@]}" install --no-build-isolation --no-deps --force-reinstall .
"$venv/bin/python" -m pytest "$@"
