#!/usr/bin/env bash
# Creates .venv-robosuite15 (or the folder named by the first argument): numpy and robosuite 1.5 for --env_python, beside
# the robosuite 1.4 that LIBERO needs. PYTHON names the interpreter to use.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
folder="${1:-.venv-robosuite15}"
"${PYTHON:-python3}" -m venv "$folder"
"$folder/bin/python" -m pip install --quiet -c constraints.txt numpy mujoco numba fast-simplification scipy pillow \
  termcolor tqdm opencv-python-headless
# Without its dependencies: robosuite 1.5 would pull in viewers and a MuJoCo newer than it works with.
"$folder/bin/python" -m pip install --quiet --no-deps robosuite==1.5.2
MUJOCO_GL="${MUJOCO_GL:-egl}" "$folder/bin/python" -c 'import robosuite' 2> /dev/null
echo "robosuite 1.5 is installed; use it with: --env_python $folder/bin/python"
