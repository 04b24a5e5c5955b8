#!/usr/bin/env bash
# A first run, without a simulator: a policy that aims 0.2 beside the named disc corrects itself by reinforcement learning.
# Run it again to continue where it was interrupted. Further flags are passed on to the training.
#   ALGO=ppo|grpo OUT=runs/toy SEED=0 bash examples/scripts/toy_reach.sh      (about four minutes on two cores)
# POLICY=gaussian uses continuous actions from a regression head instead of tokens; it needs longer supervised training, in
# smaller batches, to see where a disc lies (5 to 6 minutes on one core), see docs/models.md. Its default OUT is runs/toy_gaussian.
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
ALGO="${ALGO:-ppo}"
SEED="${SEED:-0}"
POLICY="${POLICY:-tokens}"
# Each kind of policy has a folder of its own: what is there is not trained again.
if [ "$POLICY" = tokens ]; then OUT="${OUT:-runs/toy}"; else OUT="${OUT:-runs/toy_$POLICY}"; fi
NUM_DEMOS="${NUM_DEMOS:-4000}"

case "$ALGO" in
  ppo) estimator=(--advantage_estimator gae --n_samples_per_prompt 1 --rollout_batch_size 256 --freezing_actor_steps 1 --no-bootstrap_truncated
    --gamma 0.99 --lambd 0.95 --critic_learning_rate 1e-3) ;;
  grpo) estimator=(--advantage_estimator grpo --n_samples_per_prompt 8 --rollout_batch_size 32) ;;
  *) echo "ALGO must be ppo or grpo, not $ALGO" >&2 && exit 2 ;;
esac

case "$POLICY" in
  tokens) sft=(--max_epochs 3 --train_batch_size 64 --learning_rate 2e-3) rl=(--actor_learning_rate 5e-4) ;;
  gaussian)
    sft=(--max_epochs 5 --train_batch_size 32 --learning_rate 1.5e-3
      --model_variant oft_regression --sft_loss nll --action_std_init 0.3)
    rl=(--actor_learning_rate 3e-4 --action_std_init 0.2) ;;
  *) echo "POLICY must be tokens or gaussian, not $POLICY" >&2 && exit 2 ;;
esac

if [ ! -d "$OUT/sft/policy" ]; then
  rm -rf "$OUT/demos" "$OUT/sft"
  echo "== demos"
  python cli/collect_demos.py \
    --task_suite_name toy_reach --image_size 32 --use_proprio \
    --num_demos "$NUM_DEMOS" --keep all --offset_bias 0.0 -0.2 --noise_std 0.05 --action_quantum 0.25 \
    --num_envs 2 --seed "$SEED" --output "$OUT/demos"
  echo "== sft"
  launch cli/train_sft_vla.py \
    --demos "$OUT/demos/demos.hdf5" --pretrain tiny --action_chunk_len 3 \
    --tiny_vision_dim 32 --tiny_llm_dim 48 "${sft[@]}" --seed "$SEED" --save_path "$OUT/sft"
fi

echo "== $ALGO"
launch cli/train_ppo_vla.py \
  --pretrain "$OUT/sft/policy" --save_path "$OUT/$ALGO" \
  --task_suite_name toy_reach --eval_episodes 200 --num_envs 2 \
  "${estimator[@]}" \
  --num_episodes 4096 --train_batch_size 32 --max_epochs 2 --micro_train_batch_size 96 \
  --eps_clip_low_high 0.2 0.28 \
  "${rl[@]}" --lr_scheduler linear --lr_warmup_ratio 0.1 \
  --load_checkpoint --save_steps 4 --seed "$SEED" "$@"
