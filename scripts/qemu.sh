#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Builds for another processor and runs the tests under qemu-user.
#   scripts/qemu.sh [ARCH] [CMake arguments...]   ARCH, by Debian's name: arm64 (the default), armhf, ppc64el or s390x
# Nothing of the foreign architecture is installed on this machine: Highway, TBB and GoogleTest come as
# Debian packages unpacked into the build folder.
# (Debian 12 has no riscv64 packages, and Highway 1.0.3's RVV needs a newer compiler than its GCC 12.)
# Environment: FA2_BUILD_DIR (default: build-qemu-ARCH), FA2_TESTS (a ctest -R pattern; default: all tests),
# FA2_BUILD_TARGETS (what to build; default: all),
# FA2_QEMU_CPU (qemu's -cpu; default: max, with every extension that qemu knows, or power10).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

arch=${1:-arm64} cpu=max
[[ $# -eq 0 ]] || shift
case "$arch" in
  arm64) triplet=aarch64-linux-gnu qemu=qemu-aarch64 processor=aarch64 ;;
  armhf) triplet=arm-linux-gnueabihf qemu=qemu-arm processor=armv7l ;;
  ppc64el) triplet=powerpc64le-linux-gnu qemu=qemu-ppc64le processor=ppc64le cpu=power10 ;;
  s390x) triplet=s390x-linux-gnu qemu=qemu-s390x processor=s390x ;;
  *) echo "qemu.sh: unknown architecture '$arch': it must be arm64, armhf, ppc64el or s390x" >&2; exit 2 ;;
esac
build=${FA2_BUILD_DIR:-build-qemu-$arch}
mkdir -p "$build"
build=$(cd "$build" && pwd)
sysroot=$build/sysroot

scripts/install_deps.sh build qemu "g++-$triplet"

# A package index of the architecture, in a folder of its own.
if [[ ! -e $sysroot/complete ]]; then
  echo "Unpacking $arch packages into $sysroot"
  lists=$build/apt
  mkdir -p "$lists/lists/partial" "$lists/archives/partial" "$sysroot"
  apt=(apt-get -qq -o "APT::Architecture=$arch" -o "APT::Architectures=$arch"
       -o "Dir::State::Lists=$lists/lists" -o "Dir::Cache=$lists" -o "Dir::State::status=/dev/null"
       -o APT::Sandbox::User=)
  "${apt[@]}" update </dev/null || true  # a mirror lacks an index: what of it is needed, the download tells
  (cd "$lists/archives" && "${apt[@]}" download libhwy-dev libhwy1 libtbb-dev libtbb12 libtbbmalloc2 \
    libtbbbind-2-5 libgtest-dev googletest nlohmann-json3-dev </dev/null)
  for package in "$lists"/archives/*.deb; do dpkg-deb -x "$package" "$sysroot"; done
  rm -rf "$lists"
  touch "$sysroot/complete"
fi

cat >"$build/toolchain.cmake" <<TOOLCHAIN
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR $processor)
set(CMAKE_C_COMPILER $triplet-gcc)
set(CMAKE_CXX_COMPILER $triplet-g++)
set(CMAKE_LIBRARY_ARCHITECTURE $triplet)
set(CMAKE_FIND_ROOT_PATH $sysroot)
set(CMAKE_FIND_ROOT_PATH_MODE_PROGRAM NEVER)
set(CMAKE_FIND_ROOT_PATH_MODE_LIBRARY ONLY)
set(CMAKE_FIND_ROOT_PATH_MODE_INCLUDE ONLY)
set(CMAKE_FIND_ROOT_PATH_MODE_PACKAGE ONLY)
set(CMAKE_EXE_LINKER_FLAGS_INIT "-L$sysroot/usr/lib/$triplet -Wl,-rpath-link,$sysroot/usr/lib/$triplet")
set(CMAKE_SHARED_LINKER_FLAGS_INIT "\${CMAKE_EXE_LINKER_FLAGS_INIT}")
set(CMAKE_CROSSCOMPILING_EMULATOR
    $qemu;-cpu;${FA2_QEMU_CPU:-$cpu};-L;/usr/$triplet;-E;LD_LIBRARY_PATH=$sysroot/usr/lib/$triplet;-E;FA2_UNDER_QEMU=1)
TOOLCHAIN

cmake -S . -B "$build" -G Ninja -DCMAKE_TOOLCHAIN_FILE="$build/toolchain.cmake" \
  -DCMAKE_BUILD_TYPE=Release -DFA2_BUILD_BENCHMARKS=OFF -DFA2_BUILD_EXAMPLES=OFF \
  -DFA2_STATIC_AND_SHARED=OFF "$@"
# ${FA2_BUILD_TARGETS} is a list of words.
# shellcheck disable=SC2086
cmake --build "$build" ${FA2_BUILD_TARGETS:+--target $FA2_BUILD_TARGETS}
ctest --test-dir "$build" --output-on-failure --no-tests=error -j "$(nproc)" \
  ${FA2_TESTS:+-R "$FA2_TESTS"}
