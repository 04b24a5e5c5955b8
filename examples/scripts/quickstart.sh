#!/usr/bin/env bash
# The whole pipeline on a laptop: demonstrations of a mediocre expert -> supervised policy -> PPO in robosuite Lift, evaluated
# on 100 held-out initial states: recipes/quickstart.yaml. Run it again to continue where it was interrupted. Further flags are
# passed on to the training.
#   OUT=runs/quickstart SEED=0 bash examples/scripts/quickstart.sh      (NUM_DEMOS, RANKS: other amounts)
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
exec python cli/run_recipe.py recipes/quickstart.yaml --output "${OUT:-runs/quickstart}" \
  --set ${SEED:+"all.seed=$SEED"} ${NUM_DEMOS:+"demos.num_demos=$NUM_DEMOS"} ${RANKS:+"all.processes=$RANKS"} \
  -- "$@"
