#!/usr/bin/env bash
# Serves a vision-language model for --reward vlm with vLLM, in its own environment (.venv-vllm), since its pins
# conflict with the trainer's. Further flags go to vllm.
#   MODEL=Qwen/Qwen2.5-VL-7B-Instruct PORT=8000 bash examples/scripts/serve_vlm_vllm.sh
# then train with: --reward success:1.0 vlm:0.3 --vlm_url http://127.0.0.1:8000/v1 --vlm_model Qwen/Qwen2.5-VL-7B-Instruct
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
MODEL="${MODEL:-Qwen/Qwen2.5-VL-7B-Instruct}"
PORT="${PORT:-8000}"
VLLM="${VLLM:-}"
if [ -z "$VLLM" ]; then
  if ! [ -x .venv-vllm/bin/vllm ]; then
    "${PYTHON:-python3}" -m venv .venv-vllm
    .venv-vllm/bin/python -m pip install --quiet "${VLLM_PACKAGE:-vllm}"
  fi
  VLLM=.venv-vllm/bin/vllm
fi
exec "$VLLM" serve "$MODEL" --host "${HOST:-127.0.0.1}" --port "$PORT" --max-model-len "${MAX_MODEL_LEN:-4096}" \
  --limit-mm-per-prompt '{"image": 8}' "$@"
