#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Installs the Python package into a virtual environment (scripts/python_venv.sh) and runs python/tests, a process a core (four at most).
#   scripts/test_python.sh [pytest arguments...]
# What is installed already is kept, so a second run only rebuilds fa2. Without PyTorch its tests are left out.
# Environment: FA2_PYTHON (default: python3), FA2_VENV (default: build-python/venv), FA2_PYTHON_PACKAGES
# (more packages to install, for tests that are skipped without them), FA2_NEED_TORCH (1: fail without PyTorch).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
venv=${FA2_VENV:-build-python/venv}

scripts/python_venv.sh
# The build backend is in the environment, so that the build folder stays valid from run to run.
"$venv/bin/pip" --disable-pip-version-check -q install --no-build-isolation --no-deps --force-reinstall .
"$venv/bin/python" -m pytest -n auto --maxprocesses 4 --dist worksteal "$@"
