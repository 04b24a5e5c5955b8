#!/usr/bin/env bash
# Builds these pages and the API reference as a folder, runs/docs (or the one named by the first argument); a browser opens
# its index.html. A dead link is an error. The tools come into an environment of their own, .venv-docs.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
python=.venv-docs/bin/python
if [ ! -x .venv-docs/bin/mkdocs ]; then
  "${PYTHON:-python3}" -m venv .venv-docs
  # The extra `docs` without the package itself: docstrings are read, not imported, so torch is not needed.
  "$python" -m pip install --quiet -c constraints.txt mkdocs-material "mkdocstrings[python]" ruff
fi
NO_MKDOCS_2_WARNING=1 "$python" -m mkdocs build --strict --clean --site-dir "${1:-runs/docs}"
echo "open ${1:-runs/docs}/index.html"
