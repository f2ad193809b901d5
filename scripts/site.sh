#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Builds the site of docs/, the README and the public headers into build-site/html. A broken link fails.
#   scripts/site.sh [mkdocs build arguments...]
# Look at it: python3 -m http.server -d build-site/html
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

scripts/install_deps.sh doxygen python3 python3-venv python3-pip
venv=build-site/venv
[[ -x "$venv/bin/pip" ]] || python3 -m venv "$venv"
[[ -x "$venv/bin/mkdocs" ]] || "$venv/bin/pip" --disable-pip-version-check -q install 'mkdocs-material<10'
scripts/check_docs.sh
python3 scripts/api_pages.py build-site/api
# NO_MKDOCS_2_WARNING: this theme's notice about a version of MkDocs that it does not use.
NO_MKDOCS_2_WARNING=1 "$venv/bin/mkdocs" build --strict "$@"
echo "The site is in build-site/html"
