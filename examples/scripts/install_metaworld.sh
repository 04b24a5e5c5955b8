#!/usr/bin/env bash
# Installs Meta-World into the active Python environment, without its dependencies: it pins an older MuJoCo than robosuite
# runs with here. setup.sh does the same for .venv. For the pinned MuJoCo, give it an interpreter of its own:
#   python -m venv .venv-metaworld && .venv-metaworld/bin/pip install metaworld packaging fast-simplification
#   python cli/check_env.py metaworld --env_python .venv-metaworld/bin/python
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
python -m pip install --quiet -c constraints.txt -e ".[metaworld]"
python -m pip install --quiet --no-deps -c constraints.txt metaworld imageio
python -c 'import metaworld, mujoco; print("Meta-World is installed; MuJoCo is", mujoco.__version__)'
