#!/usr/bin/env bash
# Demonstrations of a mediocre expert on robosuite Lift: it sees the cube, but in 70 % of the episodes aims up to 4 cm
# beside it. Failures are kept, so that the policy learned from them sees well and acts badly.
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
python cli/collect_demos.py \
  --task_suite_name robosuite \
  --task_ids 0 \
  --control_freq 10 \
  --max_steps 25 \
  --cameras wrist \
  --image_size 64 \
  --use_proprio \
  --num_demos 300 \
  --keep all \
  --offset_prob 0.7 \
  --offset_max 0.04 \
  --action_quantum 0.25 \
  --num_envs 2 \
  --output runs/lift/demos \
  "$@"
