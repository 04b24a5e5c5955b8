#!/usr/bin/env bash
# Installs LIBERO into the active Python environment: hf-libero and bddl without their dependencies, which would pull in
# torchvision and another torch, and what the environments actually need. setup.sh does the same for .venv.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
python -m pip install --quiet -c constraints.txt -e ".[libero]"
python -m pip install --quiet --no-deps -c constraints.txt hf-libero bddl
python -c 'import torch; print("LIBERO is installed; torch is still", torch.__version__)'
