#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# scripts/test_python.sh with JAX and transformers too: every test of python/tests, none may lack its library.
#   scripts/test_python_full.sh [pytest arguments...]
set -euo pipefail
export FA2_PYTHON_PACKAGES="jax transformers" FA2_NEED_TORCH=1
exec "$(dirname "${BASH_SOURCE[0]}")/test_python.sh" "$@"
