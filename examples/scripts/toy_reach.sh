#!/usr/bin/env bash
# A first run, without a simulator: a policy that aims 0.2 beside the named disc corrects itself by reinforcement learning:
# recipes/toy_reach.yaml. Run it again to continue where it was interrupted. Further flags are passed on to the training.
#   ALGO=ppo|grpo OUT=runs/toy SEED=0 bash examples/scripts/toy_reach.sh      (about four minutes on two cores)
# POLICY=gaussian uses continuous actions from a regression head instead of tokens; it takes 5 to 6 minutes on one core, see
# docs/models.md. Its default OUT is runs/toy_gaussian. NUM_DEMOS, RANKS: other amounts.
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
variants=()
case "${ALGO:=ppo}" in
  ppo) ;;
  grpo) variants+=(grpo) ;;
  *) echo "ALGO must be ppo or grpo, not $ALGO" >&2 && exit 2 ;;
esac
case "${POLICY:=tokens}" in
  tokens) OUT="${OUT:-runs/toy}" ;;
  gaussian) variants+=(gaussian) OUT="${OUT:-runs/toy_gaussian}" ;;
  *) echo "POLICY must be tokens or gaussian, not $POLICY" >&2 && exit 2 ;;
esac
exec python cli/run_recipe.py recipes/toy_reach.yaml --output "$OUT" --variant "${variants[@]}" \
  --set ${SEED:+"all.seed=$SEED"} ${NUM_DEMOS:+"demos.num_demos=$NUM_DEMOS"} ${RANKS:+"all.processes=$RANKS"} \
  -- "$@"
