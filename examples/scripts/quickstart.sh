#!/usr/bin/env bash
# The whole pipeline on a laptop: demonstrations of a mediocre expert -> supervised policy -> PPO in robosuite Lift, evaluated
# on 100 held-out initial states. Run it again to continue where it was interrupted. Further flags are passed on to the
# training.
#   OUT=runs/quickstart SEED=0 bash examples/scripts/quickstart.sh
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
OUT="${OUT:-runs/quickstart}"
SEED="${SEED:-0}"
NUM_DEMOS="${NUM_DEMOS:-600}"
training_flags=("$@")
mkdir -p "$OUT"
if [ -f "$OUT/report.json" ]; then
  python examples/scripts/quickstart_report.py "$OUT"
  echo "$OUT is complete. To run it anew: rm -r $OUT, or choose another folder with OUT=..."
  exit 0
fi

# stage NAME COMMAND...: runs a command once and notes how long it took, interrupted attempts included.
running=""
stage() {
  local name="$1"
  shift
  if grep -q "^$name " "$OUT/seconds.txt" 2>/dev/null; then
    echo "== $name: done before"
    return
  fi
  echo "== $name"
  running="$name/interrupted" started=$(date +%s.%N)
  "$@"
  note_seconds "$name"
  running=""
}

note_seconds() {
  echo "$1 $(echo "$started $(date +%s.%N)" | awk '{printf "%.1f", $2 - $1}')" >>"$OUT/seconds.txt"
}
ended_early() {
  [ -n "$running" ] || return 0
  note_seconds "$running"
  echo "== ${running%/interrupted}: not finished; the same command continues" >&2
}
trap ended_early EXIT

demos() {
  rm -rf "$OUT/demos" # an interrupted recording starts anew
  python cli/collect_demos.py \
    --task_suite_name robosuite --task_ids 0 --control_freq 10 --max_steps 25 --cameras wrist --image_size 64 --use_proprio \
    --num_demos "$NUM_DEMOS" --keep all --offset_bias 0.025 0.0 --offset_prob 0.5 --offset_max 0.02 --noise_std 0.1 --action_quantum 0.25 \
    --num_envs 2 --seed "$SEED" --output "$OUT/demos"
}

sft() {
  rm -rf "$OUT/sft"
  launch cli/train_sft_vla.py \
    --demos "$OUT/demos/demos.hdf5" --pretrain tiny --action_chunk_len 5 \
    --tiny_vision_dim 32 --tiny_llm_dim 48 --tiny_llm_layers 3 \
    --max_epochs 12 --train_batch_size 64 --learning_rate 2e-3 \
    --seed "$SEED" --save_path "$OUT/sft"
}

evaluate() { # NAME POLICY
  python cli/eval_vla.py --pretrain "$2" --eval_episodes 100 --sampled --num_envs 4 --seed "$SEED" \
    --output "$OUT/eval_$1.json"
}

rl() {
  SAVE_PATH="$OUT/ppo" PRETRAIN="$OUT/sft/policy" bash examples/scripts/train_ppo_vla.sh \
    --load_checkpoint --save_steps 5 --no-val_before_train --seed "$SEED" "${training_flags[@]}"
}

stage demos demos
stage sft sft
stage eval_sft evaluate sft "$OUT/sft/policy"
stage rl rl
stage eval_rl evaluate rl "$OUT/ppo/policy"
python examples/scripts/quickstart_report.py "$OUT"
