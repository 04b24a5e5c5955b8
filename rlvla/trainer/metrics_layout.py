"""What the Custom Scalars page of TensorBoard shows of each kind of run: category -> chart -> scalars.

TensorBoard takes a scalar's name as a regular expression that must match at the name's beginning.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from rlvla.utils.metrics_log import Layout

# Categories of their own: TensorBoard merges those of the same name when it shows several runs.
SFT_LAYOUT: Layout = {
    "supervised training": {
        "loss": ["sft/loss"],
        "accuracy of tokens": ["sft/accuracy"],
        "gradient norm": ["sft/grad_norm"],
        "learning rate": ["sft/lr"],
    }
}

REWARD_MODEL_LAYOUT: Layout = {
    "reward model": {"loss": ["reward_model/loss"], "learning rate": ["reward_model/lr"]},
}


def ppo_layout(rewards: Iterable[str]) -> Layout:
    """Three questions with a few charts each.

    Args:
        rewards: the sources that are paid; what they count (`reward/success_regressions`) is no reward.
    """
    sources = "|".join(map(re.escape, ["total", *rewards]))
    return {
        "does it learn?": {
            "success at end": ["rollout/success_at_end", "eval/success_at_end"],
            "success once": ["rollout/success_once", "eval/success_once"],
            "reward per episode, by source": [f"reward/({sources})$"],
            "episode length": ["rollout/episode_length", "eval/episode_length"],
        },
        "is it stable?": {
            "entropy": ["actor/entropy"],
            "KL": ["actor/ppo_kl", "actor/ref_kl"],
            "clip fraction": ["actor/pg_clipfrac.*", "critic/vf_clipfrac"],
            "gradient norm": ["actor/grad_norm", "critic/grad_norm"],
        },
        "where does the time go?": {
            "seconds per iteration": ["timing_s/.*"],
            "environment steps per second": ["rollout/env_steps_per_s"],
            "decisions per second": ["perf/.*_decisions_per_s"],
            "tokens per second": ["perf/.*_tokens_per_s"],
            "peak memory, GB": ["perf/max_.*_gb"],
        },
    }
