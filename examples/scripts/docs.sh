#!/usr/bin/env bash
# Builds these pages and the API reference as a folder, runs/docs (or the one named by the first argument); a browser opens
# its index.html. A dead link is an error.
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
python -c 'import mkdocs, mkdocstrings' 2>/dev/null || python -m pip install --quiet -c constraints.txt -e ".[docs]"
NO_MKDOCS_2_WARNING=1 python -m mkdocs build --strict --clean --site-dir "${1:-runs/docs}"
echo "open ${1:-runs/docs}/index.html"
