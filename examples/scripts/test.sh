#!/usr/bin/env bash
# Runs the linters and all tests, learning runs and multi-process training included, on three processes. Arguments go to
# pytest:
#   bash examples/scripts/test.sh -m "not slow"
#   bash examples/scripts/test.sh -n 0 tests/unit/envs/workers/test_pool.py      (one process, to see the output)
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
if [ -d ../shared/libero_assets ]; then
  export RLVLA_LIBERO_ASSETS="${RLVLA_LIBERO_ASSETS:-$PWD/../shared/libero_assets}"
fi
ruff check .
ruff format --check .
# Types are checked while the tests are collected, which leaves a core idle.
mypy &
types=$!
# Tests of a file share fixtures and stay together, in order, since the longest come first.
failed=0
python -m pytest -n 3 --dist loadfile --no-loadscope-reorder "$@" || failed=$?
wait "$types" || failed=1
exit "$failed"
