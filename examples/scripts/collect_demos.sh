#!/usr/bin/env bash
# Demonstrations of a mediocre expert on robosuite Lift: it sees the cube, but aims 2.5 cm beside it, in half of the
# episodes up to 2 cm further. Failures are kept, so a policy trained on them sees well and acts badly.
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
python cli/collect_demos.py \
  --task_suite_name robosuite \
  --task_ids 0 \
  --control_freq 10 \
  --max_steps 25 \
  --cameras wrist \
  --image_size 64 \
  --use_proprio \
  --num_demos 600 \
  --keep all \
  --offset_bias 0.025 0.0 \
  --offset_prob 0.5 \
  --offset_max 0.02 \
  --noise_std 0.1 \
  --action_quantum 0.25 \
  --num_envs 2 \
  --output runs/lift/demos \
  "$@"
