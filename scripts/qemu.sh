#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Builds for another processor and runs the tests under qemu-user.
#   scripts/qemu.sh [ARCH] [CMake arguments...]   ARCH, by Debian's name: arm64 (the default), armhf, ppc64el, riscv64 or s390x
# Nothing of the foreign architecture is installed on this machine: Highway, TBB and GoogleTest come as
# Debian packages unpacked into the build folder.
# riscv64 needs Debian 13, its packages and its GCC 14, and is built for CPUs with the vector extension, since Highway does not detect it.
# Environment: FA2_BUILD_DIR (default: build-qemu-ARCH), FA2_TESTS (a ctest -R pattern; default: all tests),
# FA2_BUILD_TARGETS (what to build; default: all),
# FA2_QEMU_CPU (qemu's -cpu; default: max, with every extension that qemu knows, or power10).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

arch=${1:-arm64} cpu=max flags=
[[ $# -eq 0 ]] || shift
case "$arch" in
  arm64) triplet=aarch64-linux-gnu qemu=qemu-aarch64 processor=aarch64 ;;
  armhf) triplet=arm-linux-gnueabihf qemu=qemu-arm processor=armv7l ;;
  ppc64el) triplet=powerpc64le-linux-gnu qemu=qemu-ppc64le processor=ppc64le cpu=power10 ;;
  riscv64) triplet=riscv64-linux-gnu qemu=qemu-riscv64 processor=riscv64 flags=-march=rv64gcv ;;
  s390x) triplet=s390x-linux-gnu qemu=qemu-s390x processor=s390x ;;
  *) echo "qemu.sh: unknown architecture '$arch': it must be arm64, armhf, ppc64el, riscv64 or s390x" >&2; exit 2 ;;
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
  (cd "$lists/archives" && "${apt[@]}" download libhwy-dev '^libhwy1(t64)?$' libtbb-dev libtbb12 libtbbmalloc2 \
    libtbbbind-2-5 libgtest-dev googletest nlohmann-json3-dev libcli11-dev libfmt-dev '^libfmt[0-9]+$' </dev/null)
  for package in "$lists"/archives/*.deb; do dpkg-deb -x "$package" "$sysroot"; done
  rm -rf "$lists"
  touch "$sysroot/complete"
fi

# qemu's code for vectors of 256 bits and more leaves the upper halves of x86's registers dirty. Each lane's FMA is a call of libm's
# among SSE instructions, and on an Intel Xeon takes 110 ns then, 1 ns with clean registers: these clean them first.
# (Debian 13's qemu is linked statically and keeps its own.)
emulator="$qemu;-cpu;${FA2_QEMU_CPU:-$cpu}"
if [[ $(uname -m) == x86_64 ]] && grep -qsw fma /proc/cpuinfo; then
  g++ -O2 -mfma -shared -fPIC -o "$build/fma.so" -x c++ - <<'FMA'
#include <immintrin.h>
extern "C" float fmaf(float a, float b, float c) {
  _mm256_zeroupper();
  return _mm_cvtss_f32(_mm_fmadd_ss(_mm_set_ss(a), _mm_set_ss(b), _mm_set_ss(c)));
}
extern "C" double fma(double a, double b, double c) {
  _mm256_zeroupper();
  return _mm_cvtsd_f64(_mm_fmadd_sd(_mm_set_sd(a), _mm_set_sd(b), _mm_set_sd(c)));
}
FMA
  emulator="env;LD_PRELOAD=$build/fma.so;$emulator;-U;LD_PRELOAD"
fi

cat >"$build/toolchain.cmake" <<TOOLCHAIN
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR $processor)
set(CMAKE_C_COMPILER $triplet-gcc)
set(CMAKE_CXX_COMPILER $triplet-g++)
set(CMAKE_CXX_FLAGS_INIT "$flags")
set(CMAKE_LIBRARY_ARCHITECTURE $triplet)
set(CMAKE_FIND_ROOT_PATH $sysroot)
set(CMAKE_FIND_ROOT_PATH_MODE_PROGRAM NEVER)
set(CMAKE_FIND_ROOT_PATH_MODE_LIBRARY ONLY)
set(CMAKE_FIND_ROOT_PATH_MODE_INCLUDE ONLY)
set(CMAKE_FIND_ROOT_PATH_MODE_PACKAGE ONLY)
set(CMAKE_EXE_LINKER_FLAGS_INIT "-L$sysroot/usr/lib/$triplet -Wl,-rpath-link,$sysroot/usr/lib/$triplet")
set(CMAKE_SHARED_LINKER_FLAGS_INIT "\${CMAKE_EXE_LINKER_FLAGS_INIT}")
set(CMAKE_CROSSCOMPILING_EMULATOR
    $emulator;-L;/usr/$triplet;-E;LD_LIBRARY_PATH=$sysroot/usr/lib/$triplet;-E;FA2_UNDER_QEMU=1)
TOOLCHAIN

cmake -S . -B "$build" -G Ninja -DCMAKE_TOOLCHAIN_FILE="$build/toolchain.cmake" \
  -DCMAKE_BUILD_TYPE=Release -DFA2_BUILD_BENCHMARKS=OFF -DFA2_BUILD_EXAMPLES=OFF \
  -DFA2_STATIC_AND_SHARED=OFF "$@"
# ${FA2_BUILD_TARGETS} is a list of words.
# shellcheck disable=SC2086
cmake --build "$build" ${FA2_BUILD_TARGETS:+--target $FA2_BUILD_TARGETS}
ctest --test-dir "$build" --output-on-failure --no-tests=error -j "$(nproc)" \
  ${FA2_TESTS:+-R "$FA2_TESTS"}
