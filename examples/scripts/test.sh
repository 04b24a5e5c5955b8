#!/usr/bin/env bash
# Runs the linters and all tests, learning runs and multi-process training included. Arguments go to pytest:
#   bash examples/scripts/test.sh -m "not slow"
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
if [ -d ../shared/libero_assets ]; then
  export RLVLA_LIBERO_ASSETS="${RLVLA_LIBERO_ASSETS:-$PWD/../shared/libero_assets}"
fi
ruff check .
ruff format --check .
mypy
exec python -m pytest "$@"
