#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Builds Highway and oneTBB, and what the command fa2 needs, from their releases and installs them below /usr/local: for images
# that have none of them as a package, as those in which cibuildwheel makes wheels. auditwheel then puts what is shared of them
# into the wheel.
#   scripts/wheel_deps.sh
set -euo pipefail

highway=1.2.0
onetbb=2022.1.0
json=3.11.3
cli11=2.4.2
fmt=10.2.1
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

build() {  # project, tag, CMake arguments
  local project=$1 tag=$2
  shift 2
  mkdir -p "$folder/$project"
  curl -fsSL "https://github.com/$project/archive/refs/tags/$tag.tar.gz" | tar -xz --strip-components 1 -C "$folder/$project"
  cmake -S "$folder/$project" -B "$folder/$project/build" -DCMAKE_BUILD_TYPE=Release \
    -DCMAKE_POSITION_INDEPENDENT_CODE=ON -DCMAKE_INSTALL_PREFIX=/usr/local "$@"
  cmake --build "$folder/$project/build" --parallel "$(nproc)"
  cmake --install "$folder/$project/build"
}
build google/highway "$highway" -DBUILD_SHARED_LIBS=OFF -DHWY_ENABLE_TESTS=OFF -DHWY_ENABLE_EXAMPLES=OFF
build uxlfoundation/oneTBB "v$onetbb" -DTBB_TEST=OFF
build nlohmann/json "v$json" -DJSON_BuildTests=OFF
build CLIUtils/CLI11 "v$cli11" -DCLI11_BUILD_TESTS=OFF -DCLI11_BUILD_EXAMPLES=OFF -DCLI11_BUILD_DOCS=OFF
build fmtlib/fmt "$fmt" -DFMT_TEST=OFF -DFMT_DOC=OFF
ldconfig
