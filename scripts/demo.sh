#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Shows fa2 at work: installs what is missing, builds, checks the kernels against the outputs of a
# GPU kernel, prints a table of speeds, and trains a small GPT for 60 steps.
#   scripts/demo.sh [arguments of fa2_demo...]
# Environment: FA2_BUILD_DIR (default: build).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
build=${FA2_BUILD_DIR:-build}

echo "== Installing what is missing"
scripts/install_deps.sh build
echo "== Building into $build (the first time takes minutes)"
cmake -S . -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=Release >/dev/null
cmake --build "$build" --target fa2_demo train_gpt
echo "== Running"
"$build/tools/fa2_demo" "$@"
echo
echo "== Training a small GPT on fa2's kernels"
"$build/examples/train_gpt/train_gpt" --steps=60
