#!/usr/bin/env bash
# The published SimpleVLA-RL settings on LIBERO, flag for flag, on 8 GPUs of 80 GB. Further flags are passed on.
#   PRETRAIN=checkpoints/openvla-oft-sft SUITE=libero_10 bash examples/scripts/train_grpo_openvla_oft_libero.sh
# 64 groups x 8 episodes per iteration at temperature 1.6, four optimizer steps of 128 episodes, one pass; groups in which
# (nearly) all or no episodes succeed are replaced; 5 x success at the last action; mean over episodes of their token mean.
# Published for one demonstration per task: 48.9 % before, 96.9 % after, over four suites.
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
RANKS="${RANKS:-8}" launch cli/train_ppo_vla.py \
  --pretrain "${PRETRAIN:?PRETRAIN names the folder of a discrete OpenVLA-OFT checkpoint}" \
  --save_path "${SAVE_PATH:-runs/libero/grpo}" \
  --model_variant oft \
  --platform libero \
  --task_suite_name "${SUITE:-libero_10}" \
  --unnorm_key "${UNNORM_KEY:-${SUITE:-libero_10}}" \
  --num_images_in_input 1 \
  --eval_protocol shared \
  --eval_episodes 50 \
  --eval_steps 4 \
  --save_steps 20 \
  --max_steps 512 \
  --num_envs 8 \
  --num_episodes 51200 \
  --rollout_batch_size 64 \
  --n_samples_per_prompt 8 \
  --temperature 1.6 \
  --train_batch_size 128 \
  --micro_train_batch_size 8 \
  --max_epochs 1 \
  --advantage_estimator grpo \
  --reward success:1.0 \
  --reward_coef 5 \
  --filter_accuracy \
  --accuracy_lower_bound 0.1 \
  --accuracy_upper_bound 0.9 \
  --eps_clip_low_high 0.2 0.28 \
  --loss_agg_mode traj-mean-token-mean \
  --init_kl_coef 0 \
  --entropy_loss_coef 0 \
  --actor_learning_rate 5e-6 \
  --lr_scheduler constant \
  --adam_betas 0.9 0.999 \
  --l2 0.01 \
  --max_norm 1.0 \
  --zero_stage 2 \
  --bf16 \
  --gradient_checkpointing \
  "$@"
