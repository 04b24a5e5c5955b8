#!/usr/bin/env bash
# A first run, without a simulator: a policy that aims 0.2 beside the named disc corrects itself by reinforcement learning:
# recipes/toy_reach.yaml. Run it again to continue where it was interrupted. Further flags are passed on to the training.
#   ALGO=ppo|grpo OUT=runs/toy SEED=0 bash examples/scripts/toy_reach.sh      (about a minute and a half on two cores)
# POLICY=flow uses flow matching instead of a Gaussian. Instead of a compact policy, POLICY=tokens uses an OpenVLA in small,
# POLICY=gaussian one with a regression head, and POLICY=smolvla a SmolVLA in small, trained by GRPO; they take 4 to 6
# minutes, in folders of their own, see docs/models.md. NUM_DEMOS, RANKS: other amounts.
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
case "${POLICY:=compact}" in
  compact) OUT="${OUT:-runs/toy}" variants=() ;;
  flow) OUT="${OUT:-runs/toy_flow}" variants=(flow) ;;
  tokens) OUT="${OUT:-runs/toy_tokens}" variants=(tiny) ;;
  smolvla) OUT="${OUT:-runs/toy_smolvla}" variants=(smolvla) ALGO="${ALGO:-grpo}" ;;
  gaussian) OUT="${OUT:-runs/toy_gaussian}" variants=(tiny tiny_gaussian) ;;
  *) echo "POLICY must be compact, flow, smolvla, tokens or gaussian, not $POLICY" >&2 && exit 2 ;;
esac
case "${ALGO:=ppo}" in
  ppo) if [ "$POLICY" = smolvla ]; then echo "POLICY=smolvla has a recipe for ALGO=grpo only" >&2 && exit 2; fi ;;
  grpo)
    case "$POLICY" in
      compact) variants+=(grpo) ;;
      flow) variants=(flow_grpo) ;;
      smolvla) ;;
      *) variants+=(tiny_grpo) ;;
    esac
    ;;
  *) echo "ALGO must be ppo or grpo, not $ALGO" >&2 && exit 2 ;;
esac
exec python cli/run_recipe.py recipes/toy_reach.yaml --output "$OUT" --variant ${variants[@]+"${variants[@]}"} \
  --set ${SEED:+"all.seed=$SEED"} ${NUM_DEMOS:+"demos.num_demos=$NUM_DEMOS"} ${RANKS:+"all.processes=$RANKS"} \
  -- "$@"
