"""The texts of the configuration problems that commands report, by flag and reason.

`Problem` lists the reasons. A text names the value and the remedy; `{flag}` is the flag's name.
"""

from __future__ import annotations

from rlvla.utils.errors import Problem

# (flag, reason) -> text; None stands for all flags without a specific text.
_TEXTS: dict[tuple[str | None, str], str] = {
    # sharing
    ("repo_id", "needs_flag"): "name the repository with --repo_id OWNER/NAME",
    ("repo_id", "malformed"): "--repo_id {value}: give OWNER/NAME ({why})",
    ("repo_id", "no_token"): (
        "there is no token for the Hugging Face Hub; make one that may write and give it to `hf auth login` or HF_TOKEN"
    ),
    ("folder", "needs_others"): (
        "{folder} acts with a policy in another folder ({others}), which would be missing; upload that one"
    ),
    ("card", "missing_file"): "--card {value} cannot be read ({why})",
    ("card", "names_places"): "--card {value}, line {number} names a place on this machine; shorten it: {line}",
    ("public", "repo_is_public"): (
        "{value} is there already and everybody can read it; give --public if that is meant, or another --repo_id"
    ),
    # batch sizes
    (None, "not_divisible"): "--{flag} {value} must be divisible by the number of ranks {ranks}",
    ("train_batch_size", "does_not_divide"): (
        "--train_batch_size {value} must divide the episodes of an iteration, rollout_batch_size x "
        "n_samples_per_prompt = {episodes}{near}"
    ),
    ("num_episodes", "too_few"): "--num_episodes {value} is less than one iteration of {episodes} episodes",
    ("num_episodes", "not_divisible"): (
        "--num_episodes {value} is no multiple of the {episodes} episodes of an iteration; give {below} or {above}"
    ),
    ("profile_steps", "out_of_range"): (
        "--profile_steps {value}: the run has {iterations} iterations, counted from 1; name some of these"
    ),
    ("profile_steps", "contradiction"): (
        "--profile_steps records training, and --val_only leaves it out; give one of the two"
    ),
    ("freezing_actor_steps", "contradiction"): (
        "--freezing_actor_steps {value}: the run has {iterations} iterations, so the actor would never be trained; "
        "lower it or raise --num_episodes"
    ),
    ("train_max_tokens_per_gpu", "too_few"): (
        "--train_max_tokens_per_gpu {value}: one decision has {needed} tokens; give at least that"
    ),
    # how the policy draws its actions
    ("pretrain", "mismatch"): "--pretrain: this command cannot train this policy: {why}",
    ("entropy_loss_coef", "mismatch"): "--entropy_loss_coef {value} does not work with this policy: {why}",
    ("kl_estimator", "mismatch"): "--kl_estimator {value} does not work with this policy: {why}",
    ("advantage_estimator", "mismatch"): "--advantage_estimator {value} does not work with this policy: {why}",
    ("share_backbone", "mismatch"): "--share_backbone does not work with this policy: {why}",
    ("policy_loss", "mismatch"): "--policy_loss {value} does not work with this policy: {why}",
    **{
        (flag, "mismatch"): f"--{flag} {{value}} does not work with this policy: {{why}}; leave it out"
        for flag in ("target_kl", "rollout_is", "rollout_rs", "temperature", "flow_noise_level_end")
    },
    ("advantage_estimator", "contradiction"): (
        "--advantage_estimator {value} trains a critic, and --algorithm {algorithm} has none; give grpo or another one"
    ),
    ("zero_stage", "contradiction"): (
        "--zero_stage 3: --algorithm {algorithm} averages its weights, which must be whole on every rank; give 0 to 2"
    ),
    ("policy_loss", "needs_flag"): "--policy_loss {value} does not work with this policy: {why}",
    ("algorithm", "needs_flag"): "--algorithm {value} does not work with this policy: {why}",
    ("flow_method", "needs_flag"): (
        "--flow_method ode samples without noise, so that --policy_loss {loss} has no probabilities to compare; give "
        "--policy_loss fpo, or another --flow_method"
    ),
    ("label_smoothing", "mismatch"): "--label_smoothing does not work with this policy: {why}; leave it out",
    ("sft_loss", "mismatch"): "--sft_loss does not work with this policy: {why}; leave it out",
    # early stopping
    ("early_stop_by", "contradiction"): (
        "--early_stop_by {value}: with {how} sampled success depends on what is chosen to be played; end by "
        "evaluations instead"
    ),
    ("plateau_iterations", "too_few"): (
        "--plateau_iterations 1: one iteration has no spread to compare with; give at least 2, or 0 for no report"
    ),
    ("early_stopping", "needs_flag"): (
        "--early_stopping needs evaluations during training: give --eval_steps, or --early_stop_by sampled"
    ),
    ("early_stopping", "too_few"): (
        "--early_stopping needs evaluations of at least {least} episodes: --eval_episodes {episodes} on {tasks} "
        "task(s) is too few"
    ),
    # measurements during supervised training
    ("heldout_share", "too_few"): (
        "--heldout_share {value} of {states} initial state(s) leaves nothing to {purpose}; give another share, or more "
        "demonstrations"
    ),
    ("early_stopping", "no_effect"): (
        "--early_stopping {value} has no effect without measurements; give --heldout_share or --eval_epochs"
    ),
    ("eval_epochs", "unavailable"): (
        "--eval_epochs {value}: episodes cannot be played in the suite of the demonstrations: {why}"
    ),
    ("eval_epochs", "mismatch"): "--eval_epochs {value}: {why}; leave it out",
    # offloading
    ("offload_during_rollout", "needs_flag"): "--offload_during_rollout needs --zero_stage 1, 2 or 3",
    ("offload_during_rollout", "contradiction"): (
        "--offload_during_rollout: --adam_offload keeps optimizer states in host memory all the time; choose one"
    ),
    ("offload_during_rollout", "unavailable"): (
        "--offload_during_rollout moves memory from an accelerator to the host, and there is no accelerator; leave it "
        "out"
    ),
    # groups and levels
    ("advantage_estimator", "too_few"): (
        "--advantage_estimator {value} compares the episodes of a group: --n_samples_per_prompt {n} must be at least 2"
    ),
    ("filter_zero_variance", "too_few"): (
        "--filter_zero_variance drops every group of --n_samples_per_prompt {n}; give at least 2"
    ),
    ("log_prob_level", "contradiction"): (
        "--log_prob_level {value} sums over several advantages of --advantage_level {advantage_level}; choose the "
        "advantage level at least as coarse"
    ),
    # bounds
    ("eps_clip_low_high", "out_of_range"): "--eps_clip_low_high {value}: give two widths, low <= high",
    (None, "bounds_crossed"): "--{flag} {value} exceeds --{other} {bound}; swap them",
    ("denoising_clip", "out_of_range"): "--denoising_clip {value}: give two widths, first <= last",
    ("reward_clip_range", "out_of_range"): "--reward_clip_range {value}: give two bounds, low < high",
    ("filter_metric_range", "out_of_range"): "--filter_metric_range {value}: give two bounds, low < high",
    ("filter_metric", "needs_flag"): "--filter_metric {value} needs --filter_metric_range LOW HIGH",
    ("filter_metric", "unknown_name"): "--filter_metric {value}: episodes have no such number; they have {known}",
    ("normalize_reward", "contradiction"): (
        "--normalize_reward: {estimator} normalizes each component of the reward by itself; leave it out"
    ),
    ("reward_clip_range", "contradiction"): (
        "--reward_clip_range: {estimator} uses the components of the reward rather than their sum, which would be "
        "clipped; leave it out"
    ),
    ("async_rollout", "unsupported"): (
        "--async_rollout: --algorithm {value} does not say what to play ahead (`Algorithm.plan_ahead`); leave it out"
    ),
    ("async_rollout", "contradiction"): (
        "--async_rollout plays and trains at the same time, and {other} takes turns; leave one out"
    ),
    ("reward_schedule", "contradiction"): (
        "--reward_schedule changes the weights while episodes of other iterations are trained on, and {estimator} "
        "divides by them; leave out --async_rollout or the schedule"
    ),
    ("deterministic_rollout", "contradiction"): (
        "--deterministic_rollout: with {other} it depends on timing which weights decide; leave one out"
    ),
    ("proximal", "unsupported"): "--proximal {value}: {loss} takes no ratio of log-probs; leave it out",
    ("proximal", "contradiction"): (
        "--proximal {value} makes no pass of the policy before the update, and {other} needs one; leave one out"
    ),
    ("rollout_is", "contradiction"): (
        "--rollout_is seq_mask_tis weighs tokens and masks decisions; leave out --rollout_is_level"
    ),
    # KL
    ("use_kl_loss", "no_effect"): "--use_kl_loss has no effect with --init_kl_coef 0; give the KL a weight",
    ("kl_target", "needs_flag"): "--kl_target steers --init_kl_coef, which is 0; give it a start value",
    ("use_kl_in_reward", "contradiction"): (
        "--use_kl_in_reward and --use_kl_loss penalize the same KL twice; choose one"
    ),
    ("use_kl_in_reward", "needs_flag"): (
        "--no-use_kl_in_reward: --init_kl_coef {value} would have no effect; give --use_kl_loss, or no weight"
    ),
    ("kl_estimator", "contradiction"): (
        "--kl_estimator {value}: the suffix + changes the gradient, and a KL in the reward has none; give "
        "{without_suffix}, or --use_kl_loss"
    ),
    ("init_kl_coef", "contradiction"): (
        "--init_kl_coef {value}: {estimator} uses the components of the reward rather than their sum, from which the "
        "KL is subtracted; give --use_kl_loss"
    ),
    # steps
    ("target_kl", "no_effect"): (
        "--target_kl {value}: an iteration has only one optimizer step, so there is none to skip; raise "
        "--max_epochs or lower --train_batch_size"
    ),
    ("ema_beta", "contradiction"): "--ema_beta {value} needs whole parameters on every rank: --zero_stage 0, 1 or 2",
    ("use_ema", "needs_flag"): "--use_ema: there is no moving average; give --ema_beta, for example 0.99",
    ("ptx_coef", "needs_flag"): "--ptx_coef and --ptx_demos belong together: give both or neither",
    # folders and runs that are continued
    (None, "folder_in_use"): "--{flag}: {why}",
    ("save_path", "invalid_file"): "{error}; name another --save_path",
    ("save_path", "mismatch"): (
        "--save_path: {folder} holds no run of this command ({file} is missing); name another folder"
    ),
    ("load_checkpoint", "missing_file"): (
        "--val_only --load_checkpoint: there is no checkpoint in {folder}; name the run with --save_path, or leave out "
        "--load_checkpoint to evaluate --pretrain"
    ),
    (None, "changed"): (
        "--{flag} {value}: the run in {folder} was started with {known}; repeat that, or name another --save_path"
    ),
    ("load_checkpoint", "unknown_name"): (
        "--load_checkpoint {value}: there is no such checkpoint in {folder}; there are: {known}"
    ),
    (
        "critic_from",
        "contradiction",
    ): "--critic_from rm_model: the critic would also start from --critic_pretrain; choose one",
    ("critic_from", "needs_flag"): (
        "--critic_from rm_model: the run has no reward model; give --reward_pretrain, or --reward rm_model with "
        "--rm_model_path"
    ),
    ("images", "duplicate"): "--images: {value} is given twice",
    ("images", "no_effect"): "--images none: {folder} reads no images; leave it out",
    ("instructions", "duplicate"): "--instructions: {value} is given twice",
    ("instructions", "too_few"): (
        "--instructions shuffled: all evaluated tasks have one instruction, '{text}'; evaluate several tasks"
    ),
    ("replay", "not_playable"): "--replay: {why}",
    ("video_cameras", "needs_flag"): "--video_cameras: no videos are recorded; give --num_videos as well",
    ("each_perturbation", "needs_flag"): "--each_perturbation: there is none; give --perturb KIND=LEVEL ...",
    ("eval_samples", "needs_flag"): (
        "--eval_samples {value}: greedy episodes of an initial state are all alike; give {switch}"
    ),
    ("eval_samples", "contradiction"): (
        "--eval_samples {value}: baselines are compared episode by episode, one for each initial state; leave out "
        "--compare, or this"
    ),
    ("task_weights", "contradiction"): (
        "--task_weights: --task_sampler chooses the tasks by itself; leave one of them out"
    ),
    ("task_sampling", "contradiction"): (
        "--task_sampling {value}: --task_sampler chooses the tasks by itself; leave one of them out"
    ),
    ("save_hf_ckpt", "needs_flag"): "--save_hf_ckpt exports policies with the checkpoints; give --save_steps",
    ("lora_dropout", "needs_flag"): "--lora_dropout {value} has no effect without adapters; give --lora_rank",
    ("lora_dropout", "contradiction"): (
        "--lora_dropout {value}: rollouts and updates must score an action alike, and dropout would change every "
        "probability ratio; use it in train_sft_vla.py, and leave it out here"
    ),
    # evaluation
    ("report", "invalid_file"): "--report {value} is a file; name a folder",
    ("compare", "duplicate"): "--compare {value} is given twice",
    ("task_suite_name", "duplicate"): "--task_suite_name names {value} twice",
    ("compare", "mismatch"): (
        "--compare {value} is an evaluation of {suite} alone; compare with one of all these suites"
    ),
    ("compare", "modes_differ"): "--compare {value} was evaluated {other} only; this evaluation is {own}",
    ("compare", "protocols_differ"): (
        "--compare {value} was not measured by the same protocol ({differences}); evaluate both alike, or give "
        "--allow_unpaired for a marked comparison without pairs"
    ),
    # the observations of a model
    (None, "image_count"): "{folder} takes {wanted} image(s); there are those of {cameras}",
    (None, "cameras"): (
        "{folder} was trained on the camera(s) {known}, and would be shown {shown}; train one on these"
    ),
    (None, "image_size"): "{folder} takes images of {wanted} pixels; these have {size}",
    (None, "render_quality"): (
        "{folder} was trained on --render_quality {quality}, and would be shown {shown}; train one on these"
    ),
    (None, "proprio_dims"): "{folder} takes {wanted} numbers of proprioception; {there_are}",
    ("critic_pretrain", "mismatch"): (
        "{folder} prepares observations differently ({what}); train a critic from this policy, or leave the flag out"
    ),
    ("critic_pretrain", "action_shape"): (
        "{folder} values chunks of {own} action tokens; the policy acts in {policy}: train one with its "
        "--action_chunk_len"
    ),
    # a checkpoint and the environment
    ("action_chunk_len", "mismatch"): "--action_chunk_len {value}: the checkpoint predicts {wanted}",
    ("num_images_in_input", "mismatch"): "--num_images_in_input {value}: the checkpoint takes {wanted}",
    ("cameras", "mismatch"): "--cameras {value}: the checkpoint takes {wanted} image(s)",
    ("use_proprio", "mismatch"): (
        "--use_proprio: the checkpoint {takes} proprioception; leave the flag out or agree with it"
    ),
    ("image_size", "mismatch"): "--image_size {value}: the checkpoint takes {wanted} pixels",
    ("task_suite_name", "action_dims"): "suite {suite} has {dims} action dimensions; the checkpoint predicts {wanted}",
    ("task_suite_name", "macro_steps"): (
        "a primitive of these tasks takes up to {length} steps, and a policy for them predicts chunks of that length; "
        "the checkpoint predicts {value}"
    ),
    ("task_suite_name", "primitives"): (
        "the scripted expert of {task} gives actions of the controller, not primitives; leave --action_space out"
    ),
    ("task_suite_name", "proprio_dims"): (
        "suite {suite} has {length} numbers of proprioception; the checkpoint takes {wanted}"
    ),
    # demonstrations played by a policy
    ("policy", "other_suite"): (
        "--policy {value} was trained in {suite}, and --task_suite_name names {asked}; leave that out"
    ),
    ("policy", "other_tasks"): (
        "--policy {value} was trained on {tasks}, and --task_ids names {asked}; name some of its tasks, or leave that "
        "out"
    ),
    (None, "too_few_states"): (
        "--{flag} {value}: greedy actions are the same in every episode from a state, and {task} has {states} to "
        "record from; ask for fewer, or give --temperature"
    ),
    (None, "of_policy"): (
        "--{flag}: the actions are those of --policy, and demonstrations hold ordinary ones; leave it out"
    ),
    ("rm_state_input", "needs_flag"): (
        "the checkpoint was trained with --rm_state_input {value}: repeat it, with rm in --reward (rm:0 pays nothing)"
    ),
    ("rm_state_input", "changed"): "the checkpoint was trained with another machine's state: {differences}",
    ("rm_state_input", "no_proprio"): (
        "--rm_state_input proprio: the checkpoint takes no proprioception; use --rm_state_input prompt"
    ),
    ("rm_state_input", "proprio_dims"): (
        "--rm_state_input proprio: {length} numbers of the environment and {width} states make {both}, but the "
        "checkpoint's projector takes {wanted}; only a checkpoint trained with it fits: use --rm_state_input prompt, "
        "which always works"
    ),
    # demonstrations and the policy they are for
    ("demos", "action_dims"): "{path} has {dims} action dimensions; {folder} predicts {wanted}",
    ("demos", "cameras"): "{path} has {cameras} camera(s); {folder} takes {wanted}; choose with --cameras",
    ("demos", "image_size"): "{path} has images of {size} pixels; {folder} takes {wanted}",
    ("demos", "no_proprio"): "{folder} takes proprioception, which {path} does not hold",
    ("demos", "proprio_dims"): "{path} has {length} numbers of proprioception; {folder} takes {wanted}",
    # training data
    ("demos", "too_few"): (
        "--demos {value}: {rows} decisions cannot be shared by {ranks} ranks; use fewer ranks or more demonstrations"
    ),
    ("demos", "too_few_frames"): (
        "--demos {value}: {frames} training frames cannot be shared by {ranks} ranks; use fewer ranks or more episodes"
    ),
    ("demos", "one_outcome"): (
        "--demos {value}: the {part} episodes hold {successes} successes among {episodes}; both outcomes are needed: "
        "record with --keep all and an expert that errs"
    ),
    ("pairs", "mismatch"): "--pairs {value}: {demos}: {why}",
    ("pairs", "too_few"): (
        "--pairs {value}: the {part} episodes ({episodes}) make {pairs} pairs of a better and a worse episode of one "
        "task; record more episodes"
    ),
    ("train_batch_size", "pairs"): (
        "--train_batch_size {value}: a pair has {frames} frames; give a multiple of that, for each of {ranks} rank(s)"
    ),
    # a new model
    ("use_proprio", "no_state"): "--no-use_proprio: a {family} policy reads the robot's state; leave it out",
    ("demos", "no_state"): "--demos {value} has no proprioception, which a {family} policy reads as the robot's state",
    ("fit_to_demos", "no_state"): (
        "--fit_to_demos: {value} has no proprioception, which the policy reads as the robot's state"
    ),
    ("ema_decay", "contradiction"): "--ema_decay {value} needs whole parameters on every rank: --zero_stage 0, 1 or 2",
    ("tiny_vision_dim", "not_divisible"): "--tiny_vision_dim {value} must be a multiple of 4",
    ("tiny_llm_dim", "not_divisible"): (
        "--tiny_llm_dim {value} gives {heads} head(s) of odd width; take a multiple of {width}"
    ),
    ("tiny_patch_size", "not_divisible"): "--tiny_patch_size {value} must divide the image size {size}",
    ("action_chunk_len", "contradiction"): (
        "--action_chunk_len {value}: an autoregressive model predicts one action; leave it out"
    ),
    ("action_std", "needs_flag"): "--action_std {value}: the actions have no standard deviation; give {needed}",
    ("action_std_init", "needs_flag"): (
        "--action_std_init {value}: the actions have no standard deviation; give {needed}"
    ),
    ("unnorm_key", "unknown_name"): "--unnorm_key {value}: {path} has statistics for {known}",
    # other commands
    ("init_state_id", "out_of_range"): "--init_state_id {value}: {task} has initial states 0..{last}",
    ("name", "missing"): "give the new environment a name, e.g. my_robot",
    ("name", "malformed"): (
        "--name {value}: write lower-case letters, digits and underscores, beginning with a letter, e.g. my_robot"
    ),
    ("name", "duplicate"): "--name {value}: a suite of this name ships with rlvla; choose another",
    ("output", "not_png"): "--output {value}: the contact sheet is a PNG; name a file that ends in .png",
    ("output", "not_writable"): "{why}; --output names another place for the results",
    ("control_freq", "unknown_name"): (
        "--control_freq: {demos} does not record its environment steps per second, and suite {suite} is not known "
        "here; give them"
    ),
    ("control_freq", "mismatch"): "--control_freq: {why}; or give the environment steps per second",
    ("render_steps", "no_effect"): "--render_steps: {demos} already has an image of each step; leave it out",
    ("episodes", "out_of_range"): "--episodes {value}: {demos} has {episodes} episodes",
    ("demos", "not_playable"): "--demos: {why}",
    ("after_success", "no_effect"): (
        "--after_success continue (given, or recorded with the checkpoint): --success_source {source} ends episodes; "
        "give --after_success end"
    ),
    # flags without effect; `typed` is the flag with its value
    (None, "no_effect"): "{typed}: {why}; leave it out",
}

# Why a flag has no effect.
_UNREAD = {
    "learner": "--algorithm {algorithm} does not use it",
    "success alone": "--nft_reward success does not use it",
    "own average": "--algorithm {algorithm} has a moving average of its own, --nft_rollout_decay",
    "estimator": "--advantage_estimator {estimator} does not use it",
    "loss": "--policy_loss {loss} does not use it",
    "whole ratio": "--policy_loss {loss} compares whole decisions",
    "loss mode": "--policy_loss {loss} has a fixed mode, and there is no other loss",
    "no critic": "{estimator} has no critic",
    "shared critic": "--share_backbone trains one network",
    "switch": "it belongs to --{switch}, which is off",
    "not given": "it belongs to --{switch}, which is not given",
    "missing": "there is no --{switch}",
    "no expert": "--policy plays, not the scripted expert",
    "value": "--{switch} is {value}",
    "no KL": "there is no KL with --init_kl_coef 0",
    "mode": "no such mode is chosen",
    "no lonely episode": "no group has a single episode",
    "no filter": "no filter is on",
    "other source of success": "--success_source {source} does not use it",
    "curriculum": "--task_sampling is uniform",
    "one task": "there is only one task",
    "other early end": "--early_stop_by {by} does not use it",
    "another model": "it describes a new {kind} model, and --pretrain is {pretrain}",
    "no LeRobot policy": "it is for policies in LeRobot's format, and --pretrain is {pretrain}",
    "public checkpoint": "it describes public checkpoints, and --pretrain is {kind}",
    "by tokens": "--use_dynamic_batch splits by tokens",
    "not ahead": "with --max_staleness 0 nothing is played ahead",
}


def problem(flag: str | None, reason: str, **values: object) -> Problem:
    """A problem with its text, into which `values` are filled; if `flag` is None, the caller adds it."""
    text = _TEXTS.get((flag, reason)) or _TEXTS[None, reason]
    return Problem(flag, reason, text.format(flag=flag, **values))


def unread(flag: str, typed: str, why: str, **values: object) -> Problem:
    """The problem of a flag that is set but has no effect.

    Args:
        flag: name of the flag.
        typed: the flag with its value, as on a command line.
        why: a key of `_UNREAD`.
        values: values filled into that phrase.
    """
    return problem(flag, "no_effect", typed=typed, why=_UNREAD[why].format(**values))
