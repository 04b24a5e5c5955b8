#!/usr/bin/env bash
# PPO with a critic on robosuite Lift, from a supervised start, on two ranks. Further flags are passed on.
#   PRETRAIN=runs/lift/sft/policy SAVE_PATH=runs/lift/ppo bash examples/scripts/train_ppo_vla.sh
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
launch cli/train_ppo_vla.py \
  --pretrain "${PRETRAIN:-runs/lift/sft/policy}" \
  --save_path "${SAVE_PATH:-runs/lift/ppo}" \
  --task_suite_name robosuite \
  --task_ids 0 \
  --eval_protocol heldout \
  --eval_episodes 100 \
  --num_envs 4 \
  --num_episodes 5120 \
  --rollout_batch_size 128 \
  --n_samples_per_prompt 1 \
  --train_batch_size 16 \
  --micro_train_batch_size 80 \
  --max_epochs 3 \
  --temperature 1.0 \
  --advantage_estimator gae \
  --advantage_level action \
  --log_prob_level token \
  --gamma 0.99 \
  --lambd 0.95 \
  --no-bootstrap_truncated \
  --eps_clip_low_high 0.2 0.28 \
  --value_clip 0.2 \
  --actor_learning_rate 4e-4 \
  --critic_learning_rate 1e-3 \
  --lr_scheduler linear \
  --lr_warmup_ratio 0.05 \
  --freezing_actor_steps 2 \
  --max_norm 1.0 \
  --zero_stage 0 \
  "$@"
