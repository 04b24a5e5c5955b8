#!/usr/bin/env bash
# Installs ManiSkill 3 into an environment of its own, because it needs an older numpy: .venv-maniskill, or the folder
# that is named. Where no Vulkan driver works, as on machines without a GPU, Debian 12 gets that of its backports,
# unpacked into that folder.
#   bash examples/scripts/install_maniskill.sh [FOLDER]
#   python cli/check_env.py maniskill --env_python .venv-maniskill/bin/maniskill-python
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
venv="$(realpath -m "${1:-$root/.venv-maniskill}")"
[ -x "$venv/bin/python" ] || "${PYTHON:-python3.11}" -m venv "$venv"
"$venv/bin/pip" install --quiet "torch==2.13.0" "numpy<2"
"$venv/bin/pip" install --quiet "mani_skill==3.0.1" "numpy<2" "setuptools<81"

draws() {
  "$@" -c '
import gymnasium, mani_skill.envs
gymnasium.make("PushCube-v1", obs_mode="rgb", num_envs=1, sim_backend="physx_cpu", render_backend="cpu").reset(seed=0)' >/dev/null 2>&1
}

write_launcher() { # with the folder of a private Mesa, if there is one
  {
    echo '#!/bin/bash'
    [ -z "${1:-}" ] || {
      echo "export LD_LIBRARY_PATH=\"$1/usr/lib/$(uname -m)-linux-gnu\${LD_LIBRARY_PATH:+:\$LD_LIBRARY_PATH}\""
      echo "export VK_ICD_FILENAMES=\"$1/usr/share/vulkan/icd.d/lvp_icd.json\""
    }
    echo "exec \"$venv/bin/python\" \"\$@\""
  } > "$venv/bin/maniskill-python"
  chmod +x "$venv/bin/maniskill-python"
}

private_mesa() {
  local mesa="$venv/mesa" keyring=/usr/share/keyrings/debian-archive-keyring.gpg mirror suite
  # The mirror that this machine uses; backports lie beside the release.
  mirror="$(apt-get indextargets --format '$(REPO_URI)' 'Codename: bookworm' | head -n 1)"
  mkdir -p "$mesa/state/lists/partial" "$mesa/cache/archives/partial"
  for suite in bookworm-backports bookworm; do
    echo "deb [signed-by=$keyring] $mirror $suite main"
  done > "$mesa/sources"
  local options=(-o "Dir::Etc::sourcelist=$mesa/sources" -o Dir::Etc::sourceparts=/dev/null
    -o "Dir::State::lists=$mesa/state/lists" -o "Dir::Cache=$mesa/cache")
  apt-get "${options[@]}" update -qq
  (cd "$mesa" && apt-get "${options[@]}" -qq -t bookworm-backports download mesa-vulkan-drivers libdrm2 libdrm-amdgpu1 mesa-libgallium)
  (cd "$mesa" && apt-get "${options[@]}" -qq download libvulkan1)
  for package in "$mesa"/*.deb; do dpkg -x "$package" "$mesa/root"; done
}

write_launcher
if ! draws "$venv/bin/maniskill-python" && grep -q bookworm /etc/os-release 2>/dev/null; then
  private_mesa
  write_launcher "$venv/mesa/root"
fi
if draws "$venv/bin/maniskill-python"; then
  echo "ManiSkill is installed: --env_python $venv/bin/maniskill-python"
else
  echo "ManiSkill is installed, but no Vulkan driver works: install one (Mesa 25 or newer on a CPU)" >&2
  exit 1
fi
