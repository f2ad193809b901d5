#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Installs with apt what fa2 needs and this machine lacks; says nothing when all is there.
#   scripts/install_deps.sh [GROUP|PACKAGE...]    groups: build (the default), format, qemu, python
# Works as root, or as a user who may use sudo.
set -euo pipefail

packages=()
for group in "${@:-build}"; do
  case "$group" in
    build) packages+=(g++ cmake ninja-build pkg-config libhwy-dev libtbb-dev libgtest-dev
                      libbenchmark-dev nlohmann-json3-dev libcli11-dev libfmt-dev libopenblas-dev) ;;
    format) packages+=(clang-format git) ;;
    qemu) packages+=(qemu-user) ;;
    python) packages+=(python3 python3-dev python3-venv python3-pip) ;;
    *) packages+=("$group") ;;
  esac
done

missing=()
for package in "${packages[@]}"; do
  status=$(dpkg-query -W -f='${db:Status-Status}' "$package" 2>/dev/null || true)
  [[ "$status" == installed* ]] || missing+=("$package")
done
if [[ ${#missing[@]} -eq 0 ]]; then exit 0; fi

sudo=()
if [[ $(id -u) -ne 0 ]]; then
  if ! command -v sudo >/dev/null; then
    echo "install_deps.sh: missing packages (${missing[*]}), and neither root nor sudo to install them" >&2
    exit 1
  fi
  sudo=(sudo)
fi

echo "Installing ${missing[*]}"
apt=("${sudo[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -qq -o DPkg::Lock::Timeout=300
     -o Dpkg::Use-Pty=0)
log=$(mktemp)
trap 'rm -f "$log"' EXIT
if ! { "${apt[@]}" update && "${apt[@]}" install -y --no-install-recommends "${missing[@]}"; } \
    </dev/null >"$log" 2>&1; then
  cat "$log" >&2
  echo "install_deps.sh: apt could not install ${missing[*]}" >&2
  exit 1
fi
