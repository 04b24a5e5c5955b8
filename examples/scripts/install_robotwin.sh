#!/usr/bin/env bash
# Installs RoboTwin 2.0's package into an environment of its own: .venv-robotwin, or the folder that is named. It gets
# what stepping needs: no cuRobo (the planner that needs CUDA; RoboTwin plans with mplib instead), no open3d (for point
# clouds) and torch for CPUs where the index offers it. Where RoboTwin's SAPIEN 3.0.0b1 finds no Vulkan driver, as on
# machines without a GPU, Debian 12 gets Mesa from its backports, unpacked into that folder, and SAPIEN 3.0.3, which
# can draw with it. RoboTwin's assets are not fetched, see docs/environments/robotwin.md.
#   bash examples/scripts/install_robotwin.sh [FOLDER]
#   python cli/check_env.py robotwin --env_python .venv-robotwin/bin/robotwin-python --robotwin_assets ASSETS
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
venv="$(realpath -m "${1:-$root/.venv-robotwin}")"
source "$root/examples/scripts/private_mesa.sh"
[ -x "$venv/bin/python" ] || "${PYTHON:-python3.11}" -m venv "$venv"
"$venv/bin/pip" install --quiet "torch==2.13.0" "numpy==1.26.4"
"$venv/bin/pip" install --quiet "numpy==1.26.4" "sapien==3.0.0b1" "mplib==0.2.1" "toppra==0.6.3" "gymnasium==0.29.1" \
  "opencv-python-headless==4.9.0.80" "scipy==1.10.1" "transforms3d==0.4.2" "trimesh==4.4.3" "imageio<3" \
  pillow pyyaml huggingface_hub "setuptools<81"
"$venv/bin/pip" install --quiet --no-deps "rlinf-robotwin-runtime==0.1.3"

draws() {
  "$@" -c '
import sapien
scene = sapien.Scene()
camera = scene.add_camera("camera", 8, 8, 1, 0.1, 10)
scene.update_render()
camera.take_picture()
camera.get_picture("Color")' >/dev/null 2>&1
}

launch robotwin-python
if ! draws "$venv/bin/robotwin-python" && grep -q bookworm /etc/os-release 2>/dev/null; then
  private_mesa
  launch robotwin-python "$venv/mesa/root"
  "$venv/bin/pip" install --quiet --no-warn-conflicts "sapien==3.0.3" "numpy==1.26.4" "setuptools<81"
fi
if draws "$venv/bin/robotwin-python"; then
  echo "RoboTwin is installed: --env_python $venv/bin/robotwin-python"
else
  echo "RoboTwin is installed, but no Vulkan driver works: install one (on a CPU Mesa 25 or newer, and sapien 3.0.3)" >&2
  exit 1
fi
