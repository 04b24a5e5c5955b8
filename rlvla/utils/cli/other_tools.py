"""Flags of OpenRLHF, verl and TRL that resemble one of ours but are no synonym; for synonyms see `aliases` of `arg`."""

from __future__ import annotations

_PASSES = (
    "a run is as long as its episodes, not counted in passes over prompts; passes over the episodes of an iteration "
    "are --max_epochs"
)
_DECISIONS = "it counts decisions, of which an episode has many"
_ACCUMULATION = "accumulation follows from it, --micro_train_batch_size and the number of ranks"
_OWN_RATES = "the critic has a rate of its own, --critic_learning_rate"
_BOTH_WIDTHS = "it takes both clip widths, below and above 1"
_KL_NAMES = "values have other names: kl is k1, mse is k2, low_var_kl is k3"
_WEIGHTS = "it takes the kind of importance weights, tis for truncated ones; their cap is --rollout_is_high"
_BY_NAME = "it takes the name of a checkpoint of this run, such as iteration_000010; without one, the newest"

# Their flag -> (ours, what is different about ours); only for commands that have ours and not theirs.
OTHER_TOOLS = {
    "async_queue_size": ("max_staleness", "it counts iterations of training that the weights may lack"),
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
    "kl_loss_type": ("kl_estimator", _KL_NAMES),
    "kl_penalty": ("kl_estimator", _KL_NAMES),
    "learning_rate": ("actor_learning_rate", _OWN_RATES),
    "log_prob_micro_batch_size_per_gpu": ("micro_rollout_batch_size", _DECISIONS),
    "loss_mode": ("policy_loss", "verl's vanilla is called ppo"),
    "loss_type": ("loss_agg_mode", "it is how token losses are aggregated, in which TRL's losses differ"),
    "lr": ("actor_learning_rate", _OWN_RATES),
    "num_iterations": (
        "max_epochs",
        "an iteration is a rollout with its updates; how many follows from --num_episodes",
    ),
    "num_train_epochs": ("num_episodes", _PASSES),
    "per_device_train_batch_size": ("micro_train_batch_size", _DECISIONS),
    "ppo_micro_batch_size_per_gpu": ("micro_train_batch_size", _DECISIONS),
    "ppo_mini_batch_size": (
        "train_batch_size",
        "it counts episodes, each of a group: verl's number x --n_samples_per_prompt",
    ),
    "report_to": ("use_wandb", "it is a switch; TensorBoard has one, too, --use_tensorboard"),
    "resume_from_checkpoint": ("load_checkpoint", _BY_NAME),
    "resume_mode": ("load_checkpoint", _BY_NAME),
    "scale_rewards": ("norm_adv_by_std", "it is a switch: TRL's none is --no-norm_adv_by_std"),
    "tis_imp_ratio_cap": ("rollout_is", _WEIGHTS),
    "total_epochs": ("num_episodes", _PASSES),
    "total_training_steps": (
        "num_episodes",
        "it counts episodes: iterations x --rollout_batch_size x --n_samples_per_prompt",
    ),
    "whiten_rewards": ("normalize_reward", "it divides by a running standard deviation, not by that of the batch"),
}
