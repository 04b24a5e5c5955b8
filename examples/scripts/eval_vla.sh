#!/usr/bin/env bash
# Success of a policy on 100 initial states it never trained on, greedy and sampled, with 95 % intervals.
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
python cli/eval_vla.py \
  --pretrain runs/lift/ppo/policy \
  --eval_episodes 100 \
  --eval_protocol heldout \
  --sampled \
  --num_envs 4 \
  "$@"
