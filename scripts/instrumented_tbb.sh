#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Builds this distribution's oneTBB from its source package with ThreadSanitizer, which sees no synchronisation inside a
# library that is built without it. sanitize.sh runs it for tsan and tsan-short.
#   scripts/instrumented_tbb.sh FOLDER      FOLDER/installed: CMake finds TBB there
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
if [[ $# -ne 1 ]]; then echo "instrumented_tbb.sh: give a folder" >&2; exit 2; fi
scripts/install_deps.sh build clang libclang-rt-dev dpkg-dev
mkdir -p "$1"
cd "$1"
if [[ -e installed/complete ]]; then exit 0; fi

# Sources of packages, in lists of their own: the machine's are left as they are.
rm -rf lists onetbb-* build installed
mkdir -p lists/partial
# shellcheck source=/dev/null
. /etc/os-release
echo "deb-src [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] http://deb.debian.org/debian $VERSION_CODENAME main" >sources.list
apt=(apt-get -qq -o "Dir::Etc::sourcelist=$PWD/sources.list" -o Dir::Etc::sourceparts=- -o "Dir::State::lists=$PWD/lists"
     -o APT::Sandbox::User=)
"${apt[@]}" update
"${apt[@]}" source onetbb
cmake -S onetbb-*/ -B build -G Ninja -DCMAKE_BUILD_TYPE=RelWithDebInfo -DCMAKE_C_COMPILER=clang -DCMAKE_CXX_COMPILER=clang++ \
  -DTBB_SANITIZE=thread -DTBB_TEST=OFF -DTBB_STRICT=OFF -DTBBMALLOC_BUILD=OFF -DCMAKE_INSTALL_PREFIX="$PWD/installed"
cmake --build build --target install
touch installed/complete
