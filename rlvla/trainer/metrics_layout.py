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
    "reward model": {
        "loss": ["reward_model/loss"],
        "gradient norm": ["reward_model/grad_norm"],
        "learning rate": ["reward_model/lr"],
    }
}


# TensorBoard opens with all scalars by the alphabet: under these names what matters comes first, in this order.
PPO_OVERVIEW = {
    "rollout/success_at_end": "0_overview/1_success_at_end",
    "eval/success_at_end": "0_overview/2_success_at_end_evaluated",
    "reward/total": "0_overview/3_reward_per_episode",
    "actor/entropy": "0_overview/4_entropy",
    "actor/ppo_kl": "0_overview/5_kl",
    "actor/pg_clipfrac": "0_overview/6_clip_fraction",
    "actor/grad_norm": "0_overview/7_gradient_norm",
    "rollout/env_steps_per_s": "0_overview/8_env_steps_per_s",
    "timing_s/iteration": "0_overview/9_seconds_per_iteration",
}


def ppo_layout(rewards: Iterable[str]) -> Layout:
    """Three questions with a few charts each.

    Args:
        rewards: the sources that are paid; what they count (`reward/success_regressions`) is no reward.
    """
    names = list(rewards)
    sources = "|".join(map(re.escape, ["total", *names] if len(names) > 1 else ["total"]))
    return {
        "does it learn?": {
            "success at end": ["rollout/success_at_end", "eval/success_at_end"],
            "success once": ["rollout/success_once", "eval/success_once"],
            "reward per episode" + ", by source" * (len(names) > 1): [f"reward/({sources})$"],
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
