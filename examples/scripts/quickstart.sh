#!/usr/bin/env bash
# The whole pipeline on a laptop: demonstrations of a mediocre expert -> supervised policy -> PPO in robosuite Lift, evaluated
# on 100 held-out initial states: recipes/quickstart.yaml. Run it again to continue where it was interrupted. Further flags are
# passed on to the training.
# POLICY=flow uses flow matching instead of a Gaussian, POLICY=tokens an OpenVLA in small (12 to 15 minutes), in folders of their own.
#   OUT=runs/quickstart SEED=0 bash examples/scripts/quickstart.sh      (NUM_DEMOS, RANKS: other amounts)
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
case "${POLICY:=compact}" in
  compact) OUT="${OUT:-runs/quickstart}" variants=() ;;
  flow) OUT="${OUT:-runs/quickstart_flow}" variants=(flow) ;;
  tokens) OUT="${OUT:-runs/quickstart_tokens}" variants=(tiny) ;;
  *) echo "POLICY must be compact, flow or tokens, not $POLICY" >&2 && exit 2 ;;
esac
exec python cli/run_recipe.py recipes/quickstart.yaml --output "$OUT" --variant ${variants[@]+"${variants[@]}"} \
  --set ${SEED:+"all.seed=$SEED"} ${NUM_DEMOS:+"demos.num_demos=$NUM_DEMOS"} ${RANKS:+"all.processes=$RANKS"} \
  -- "$@"
