#!/usr/bin/env bash
# Sets up .venv in the repository (Python packages) and, with sufficient rights, the GL libraries for offscreen rendering.
# The other scripts source it; it does nothing if everything is in place.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
unset PYTHONDONTWRITEBYTECODE # images of containers set it: each process would compile all it imports

find_python() {
  for candidate in "${PYTHON:-}" python3.11 python3.12 python3; do
    [ -n "$candidate" ] && command -v "$candidate" >/dev/null 2>&1 || continue
    "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null || continue
    echo "$candidate"
    return
  done
  echo "rlvla and its pinned packages need Python 3.11 (the tested one) or 3.12; set PYTHON to one" >&2
  exit 1
}

install_packages() {
  local stamp
  stamp=".venv/.installed-$(cat setup.py constraints.txt rlvla/version.py | sha256sum | cut -c1-16)"
  [ -f "$stamp" ] && return
  # An interrupted first attempt, or a Debian without python3-venv, leaves a .venv without pip.
  if ! .venv/bin/python -m pip --version >/dev/null 2>&1; then
    local python
    python="$(find_python)"
    "$python" -m venv --clear .venv
  fi
  echo "installing Python packages into .venv (once, 2 to 4 minutes)"
  .venv/bin/python -m pip install --quiet --upgrade pip "setuptools<81" wheel
  local -x PIP_NO_COMPILE=1  # most of what is installed is never imported; the rest is compiled when it is
  # What is large and needs no torch is installed meanwhile, at pinned versions; what that needs comes with the rest.
  .venv/bin/python -m pip install --quiet --no-deps -c constraints.txt ray pyarrow scipy numba matplotlib opencv-python \
    mujoco robosuite transformers tokenizers mypy ruff &
  local without_torch=$!
  # torch first: DeepSpeed looks for it while it is built.
  echo "  1 of 2: torch, and what needs none"
  trap "kill $without_torch 2>/dev/null || true" EXIT # by number: an interrupted function has no variables
  .venv/bin/python -m pip install --quiet --no-warn-conflicts -c constraints.txt torch numpy
  wait "$without_torch"
  trap - EXIT
  echo "  2 of 2: the rest"
  # pip shows setuptools' warning that an editable installation is one.
  DS_BUILD_OPS=0 PYTHONWARNINGS="ignore:Editable installation" .venv/bin/python -m pip install --quiet -c constraints.txt \
    -e ".[robosuite,libero,metaworld,vlm,video,lerobot,ray,serve,dev]"
  # With their dependencies these would pull in torchvision and another torch, or another MuJoCo.
  .venv/bin/python -m pip install --quiet --no-deps -c constraints.txt hf-libero bddl metaworld imageio \
    gymnasium-robotics pettingzoo
  touch "$stamp"
}

rendering_works() {
  MUJOCO_GL="${MUJOCO_GL:-egl}" .venv/bin/python -c '
import mujoco, cv2
context = mujoco.GLContext(16, 16)
context.make_current()
context.free()' >/dev/null 2>&1
}

install_gl() {
  local packages="libegl1 libegl-mesa0 libgl1 libgl1-mesa-dri libopengl0 libglib2.0-0" sudo=""
  [ -f .venv/.gl-works ] && return
  if ! rendering_works && command -v apt-get >/dev/null 2>&1; then
    [ "$(id -u)" = 0 ] || sudo="sudo -n"
    if $sudo true 2>/dev/null; then
      echo "installing GL libraries: $packages"
      $sudo apt-get update -qq && DEBIAN_FRONTEND=noninteractive $sudo apt-get install -y -qq $packages >/dev/null || true
    fi
  fi
  if rendering_works; then
    touch .venv/.gl-works
  else
    echo "rendering does not work yet; install as administrator: apt-get install $packages (or set MUJOCO_GL=osmesa)" >&2
  fi
}

# Two ranks on this machine, on a free port, so that several runs do not collide.
launch() {
  local port
  port="$(python -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')"
  # Otherwise the launcher warns, twice, that it found no accelerator.
  [ -e /dev/nvidiactl ] || [ -e /dev/nvmap ] || [ -e /dev/kfd ] || [ -e /dev/dxg ] || export DS_ACCELERATOR="${DS_ACCELERATOR:-cpu}"
  deepspeed -q --num_accelerators "${RANKS:-2}" --master_port "$port" "$@"
}

install_packages
install_gl
export PATH="$PWD/.venv/bin:$PATH" MUJOCO_GL="${MUJOCO_GL:-egl}"
[ "${BASH_SOURCE[0]}" != "$0" ] || echo "next: source .venv/bin/activate"
