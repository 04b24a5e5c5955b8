#!/usr/bin/env bash
# GRPO with LoRA on one GPU of 80 to 141 GB: as train_grpo_openvla_oft_libero.sh, with fewer groups and adapters on every
# linear layer instead of all weights. Further flags are passed on.
#   PRETRAIN=checkpoints/openvla-oft-sft SUITE=libero_10 bash examples/scripts/train_grpo_openvla_oft_libero_single_gpu.sh
RANKS=1 exec bash "$(dirname "${BASH_SOURCE[0]}")/train_grpo_openvla_oft_libero.sh" \
  --save_path "${SAVE_PATH:-runs/libero/grpo_lora}" \
  --rollout_batch_size 16 \
  --train_batch_size 32 \
  --num_episodes 12800 \
  --zero_stage 0 \
  --lora_rank 32 \
  --lora_alpha 16 \
  --lora_targets all-linear \
  --actor_learning_rate 1e-5 \
  "$@"
