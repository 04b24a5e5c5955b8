"""Flags of OpenRLHF, verl and TRL that resemble ours without being synonyms (for synonyms: `aliases` of `arg`)."""

from __future__ import annotations

import re
from collections.abc import Mapping

_PASSES = (
    "a run is as long as its episodes, not counted in passes over prompts; passes over the episodes of an iteration "
    "are --max_epochs"
)
_DECISIONS = "it counts decisions, of which an episode has many"
_WHOLE_STEP = "it is the optimizer step over all ranks: TRL's number x accumulation steps x ranks"
_ACCUMULATION = "accumulation follows from it, --micro_train_batch_size and the number of ranks"
_OWN_RATES = "the critic has its own rate, --critic_learning_rate"
_BOTH_WIDTHS = "it takes both clip widths, below and above 1"
_BOTH_KLS = "it is that of the KL in the reward and, with --use_kl_loss, of that in the loss"
_WEIGHTS = "it takes the kind of importance weights, tis for truncated ones; their cap is --rollout_is_high"
_VANILLA = "ppo, and also clips dually: --eps_clip_dual 3"
_BY_NAME = "it takes the name of a checkpoint of this run, such as iteration_000010; without one, the newest"

# Their flag, or how its dotted name ends -> (ours, what is different about ours); only for commands that have all flags
# that are named, and not theirs.
OTHER_TOOLS = {
    "advantage.estimator": ("advantage_estimator", "OpenRLHF's reinforce is reinforce_plus_plus, group_norm is grpo"),
    "async_queue_size": ("max_staleness", "it is the maximum policy lag in iterations"),
    "async_train": ("async_rollout", "how far ahead episodes are played is --max_staleness"),
    "clip_ratio_high": ("eps_clip_low_high", _BOTH_WIDTHS),
    "clip_ratio_low": ("eps_clip_low_high", _BOTH_WIDTHS),
    "critic_warmup": (
        "freezing_actor_steps",
        "it counts the iterations in which the actor rests, where verl names the first one that trains it: N there is "
        "N - 1 here",
    ),
    "dynamic_filtering": (
        "filter_metric",
        "it takes what to filter by: --filter_metric score --filter_metric_range LOW HIGH, bounds inclusive; "
        "--filter_zero_variance only drops groups with equal scores",
    ),
    "dynamic_filtering_reward_range": (
        "filter_metric_range",
        "its bounds are inclusive, and it needs --filter_metric score",
    ),
    "enable_ema": (
        "use_ema",
        "it evaluates and exports the average instead of the latest weights, and needs --ema_beta, which is 0 by "
        "default",
    ),
    "enable_vllm_is_correction": ("rollout_is", _WEIGHTS),
    "epsilon_high": ("eps_clip_low_high", _BOTH_WIDTHS),
    "filter_groups": (
        "filter_zero_variance",
        "it compares the scores of a group; --filter_metric filters by other numbers",
    ),
    "flash_attn": ("attn_implementation", "it takes the name of a kernel: flash_attention_2"),
    "gradient_accumulation_steps": ("train_batch_size", _ACCUMULATION),
    "kl_loss_coef": ("init_kl_coef", "the KL is subtracted from the reward, or with --use_kl_loss part of the loss"),
    "kl_loss_type": ("kl_estimator", _BOTH_KLS),
    "kl_penalty": ("kl_estimator", _BOTH_KLS),
    "learning_rate": ("actor_learning_rate", _OWN_RATES),
    "log_prob_micro_batch_size_per_gpu": ("micro_rollout_batch_size", _DECISIONS),
    "loss_mode": ("policy_loss", f"verl's vanilla is called {_VANILLA}"),
    "loss_type": ("loss_agg_mode", "it is how token losses are aggregated, in which TRL's losses differ"),
    "lr": ("actor_learning_rate", _OWN_RATES),
    "num_iterations": (
        "max_epochs",
        "an iteration is a rollout with its updates; how many follows from --num_episodes",
    ),
    "num_train_epochs": ("num_episodes", _PASSES),
    "per_device_train_batch_size": ("train_batch_size", _WHOLE_STEP),
    "ppo_micro_batch_size_per_gpu": ("micro_train_batch_size", _DECISIONS),
    "ppo_mini_batch_size": (
        "train_batch_size",
        "it counts episodes, each of a group: verl's number x --n_samples_per_prompt",
    ),
    "report_to": ("use_wandb", "it is a switch; TensorBoard has one, too, --use_tensorboard"),
    "resume_from_checkpoint": ("load_checkpoint", _BY_NAME),
    "resume_mode": ("load_checkpoint", _BY_NAME),
    "rollout.micro_batch_size": ("micro_rollout_batch_size", _DECISIONS),
    "scale_rewards": ("norm_adv_by_std", "it is a switch: TRL's none is --no-norm_adv_by_std"),
    "tis_imp_ratio_cap": ("rollout_is", _WEIGHTS),
    "total_epochs": ("num_episodes", _PASSES),
    "train.micro_batch_size": ("micro_train_batch_size", _DECISIONS),
    "total_training_steps": (
        "num_episodes",
        "it counts episodes: iterations x --rollout_batch_size x --n_samples_per_prompt",
    ),
    "whiten_rewards": ("normalize_reward", "it divides by a running standard deviation, not by that of the batch"),
}

# How dotted names of OpenRLHF and verl end -> our flag for the same, whose name is another.
PATHS = {
    "actor.adam.lr": "actor_learning_rate",
    "actor.entropy_coef": "entropy_loss_coef",
    "actor.gradient_checkpointing_enable": "gradient_checkpointing",
    "actor.optim.lr": "actor_learning_rate",
    "actor_rollout_ref.model.path": "pretrain",
    "ckpt.max_num": "max_ckpt_num",
    "ckpt.path": "ckpt_path",
    "critic.adam.lr": "critic_learning_rate",
    "critic.cliprange_value": "value_clip",
    "critic.model.path": "critic_pretrain",
    "critic.model_name_or_path": "critic_pretrain",
    "critic.optim.lr": "critic_learning_rate",
    "critic.value_clip": "value_clip",
    "data.train_batch_size": "rollout_batch_size",
    "eval.steps": "eval_steps",
    "eval.temperature": "eval_temperature",
    "kl.estimator": "kl_estimator",
    "kl.horizon": "kl_horizon",
    "kl.init_coef": "init_kl_coef",
    "kl.target": "kl_target",
    "kl.use_loss": "use_kl_loss",
    "kl_ctrl.horizon": "kl_horizon",
    "kl_ctrl.target_kl": "kl_target",
    "lora.alpha": "lora_alpha",
    "lora.dropout": "lora_dropout",
    "lora.rank": "lora_rank",
    "reward.model_name_or_path": "reward_pretrain",
    "rollout.batch_size": "rollout_batch_size",
    "rollout.n": "n_samples_per_prompt",
    "train.batch_size": "train_batch_size",
    "train.dynamic_batch_enable": "use_dynamic_batch",
    "train.max_tokens_per_gpu": "train_max_tokens_per_gpu",
    "val_kwargs.temperature": "eval_temperature",
    "wandb.group": "wandb_group",
    "wandb.project": "wandb_project",
}
_LONGEST_PATH = 3  # words of a key of PATHS
# Flags of ours whose name means something else there -> our flag for that, if a hint is needed where ours is unread.
OTHER_MEANING = {
    "beta": "TRL's beta, the weight of the KL, is --init_kl_coef",
    "target_kl": "verl's target_kl, which the weight of the KL is adapted to, is --kl_target",
    **dict.fromkeys(("max_steps", "num_episodes", "train_batch_size"), ""),
}
# Parts of other tools with settings of their own.
_OTHER_PARTS = {"critic", "eval", "ref", "reward", "reward_model", "val_kwargs"}

# Our flag -> values as other tools call them -> what they are here.
OTHER_VALUES = {
    "advantage_estimator": {
        "dr_grpo": "grpo with --no-norm_adv_by_std",
        "group_norm": "grpo",
        "grpo_vectorized": "grpo",
        "reinforce++": "reinforce_plus_plus",
        "reinforce_plus_plus_baseline": "reinforce_baseline",
        "rloo_vectorized": "rloo",
    },
    "policy_loss": {"grpo": "ppo with --advantage_estimator grpo", "vanilla": _VANILLA},
}


def counterpart(name: str, flags: Mapping[str, str]) -> tuple[str, str]:
    """(our flag for another tool's, how it differs or ""); ("", "") if there is none.

    Args:
        name: as typed, without its dashes; of a dotted name the end is looked up, never guessed.
        flags: every name of a flag of the command -> its first name, all with their dashes.
    """
    path = name.split(".")
    dotted = len(path) > 1
    for count in range(min(len(path), _LONGEST_PATH), 0, -1):
        end = ".".join(path[-count:])
        if count == 1 and dotted and (end in OTHER_MEANING or not _OTHER_PARTS.isdisjoint(path)):
            break
        flag, difference = OTHER_TOOLS.get(end, ("", ""))
        if {f"--{flag}", *re.findall(r"--[a-z_-]+", difference)} <= flags.keys():
            return f"--{flag}", difference
        same = f"--{PATHS.get(end, end)}"
        if dotted and same in flags:
            return flags[same], ""
    return "", ""
