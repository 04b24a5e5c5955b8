"""Running `cli/train_sac_vla.py`: checks, networks, workers, trainer, and the final summary."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from rlvla.commands.off_policy.checks import CheckedSAC, check, learner_of
from rlvla.commands.off_policy.dsrl import with_base_folder
from rlvla.commands.off_policy.flags import SACRun
from rlvla.commands.run_policies import policy_record
from rlvla.commands.runs.training import begin, run_folder, started, train
from rlvla.commands.setup import CheckedRun
from rlvla.models.sac_policy import SACPolicy
from rlvla.options import options_of
from rlvla.rewards import RewardConfig, RewardPlan
from rlvla.rewards.base import REWARDS, reads_images
from rlvla.rewards.machine_source import MachineSource
from rlvla.rewards.success_source import SIMULATOR
from rlvla.rollout import RolloutEngine
from rlvla.trainer.off_policy.config import FLOW, OffPolicyConfig
from rlvla.trainer.off_policy.hindsight import MACHINE
from rlvla.trainer.off_policy.sac import SACModels, SACSetup
from rlvla.trainer.progress.report import trainable_and_all
from rlvla.trainer.reward_sources import configure_for_learner
from rlvla.trainer.trainer import Trainer
from rlvla.utils.deepspeed.config import launched_rank
from rlvla.utils.deepspeed.strategy import DeepspeedStrategy
from rlvla.utils.terminal import count, header, show

REPLAY = "replay"  # subfolder of the run folder


def run_sac(flags: SACRun) -> Trainer | None:
    """Check the configuration, train, and print a summary; problems are raised before anything is started.

    Returns:
        The trainer after the run; None for a dry run.
    """
    flags = with_base_folder(flags.completed())
    checked = check(flags)
    setting = checked.run
    if flags.run.dry_run:
        if launched_rank() == 0:
            show(describe_run(flags, checked, trainer=None))
        return None
    with started(flags, setting) as pool, ExitStack() as stack:
        actor = setting.checkpoint.load_policy()
        assert isinstance(actor, SACPolicy) and flags.sac.n_critics is not None
        models = SACModels(actor, actor.new_critic(flags.sac.n_critics))
        strategy = DeepspeedStrategy(flags.strategy, seed=flags.run.seed)
        save_path = stack.enter_context(run_folder(flags, setting, strategy))
        plan = RewardPlan.from_config(flags.rewards, flags.success)
        configure_for_learner(plan, learner_of(flags), strategy.device)
        rollout = RolloutEngine(
            pool,
            played_options(flags, setting),
            plan,
            flags.rollout,
            tasks=setting.tasks,
            state_input=setting.state_input,
            instructions=setting.instructions,
        )
        machines = plan.sources.get(MACHINE)
        assert machines is None or isinstance(machines, MachineSource)
        config = OffPolicyConfig(
            batch=flags.batch,
            schedule=flags.schedule,
            split=flags.split,
            record=policy_record(flags.noise.pretrain, flags.split, setting, checked.demos),
            reward_weights=plan.weights,
            guards=flags.guards,
            sac=flags.sac,
            replay=flags.replay,
            replay_folder=save_path / REPLAY,
            success_reward=options_of(flags.rewards, REWARDS, "success").reward_coef,
            shown_env=setting.shown_env,
            machines=machines,
            judge=plan.sources.get(flags.replay.replay_score_source or ""),
        )
        setup = SACSetup(models, strategy, config, setting.tasks, checked.demos)
        trainer = Trainer(setup, rollout, save_path, flags.ckpt_path)
        begin(trainer, flags)
        train(trainer, flags, plan, describe_run(flags, checked, trainer))
    return trainer


def played_options(flags: SACRun, setting: CheckedRun) -> dict[str, Any]:
    """Options of the environment for training: without cameras where neither policy nor judges look at images."""
    rewards, schedule = flags.rewards, flags.schedule
    judged = any(map(reads_images, rewards.reward))
    judged |= rewards.rm_propositions != RewardConfig.rm_propositions or bool(rewards.reward_pretrain)
    judged |= flags.success.success_source != SIMULATOR
    return setting.options(watched=judged or bool(schedule.num_videos) or schedule.dump_rollouts)


def describe_run(flags: SACRun, checked: CheckedSAC, trainer: Trainer | None) -> str:
    """Header of the run: policy, method, replay, task, reward, length."""
    batch, sac, replay, setting = flags.batch, flags.sac, flags.replay, checked.run
    weights = ""
    if trainer is not None:
        sizes = [trainable_and_all(engine.module)[0] for engine in trainer.algorithm.engines.values()]
        weights = f", {count(sizes[0])} parameters, {sac.n_critics} critics with {count(sizes[1])}"
    names = [task.name for task in setting.tasks]
    states = sum(len(flags.split.train_states(task)) for task in setting.tasks)
    observed = [*(["cameras"] if setting.spec.reads_images else []), *(["proprio"] if setting.env.use_proprio else [])]
    view = "; critics see the state" if sac.critic_state else ""
    rewards = " ".join(flags.rewards.reward)
    policy = sac.policy if flags.noise.pretrain is None else f"noise of {flags.noise.pretrain}"
    matching = ""
    if sac.policy == FLOW and sac.flow_matching_coef:
        matched = "replayed decisions of higher value" if replay.demos is None else "demonstrations"
        matching = f", {sac.flow_matching_coef:g} x flow matching on {matched}"
    first = f"the first {batch.exploring_episodes} at random"
    if batch.offline_updates:
        first = f"after {batch.offline_updates:,} updates on the demonstrations alone"
    rows = {
        "policy": f"{policy} (sees {' and '.join(observed)}{view}){weights}",
        "method": f"soft actor-critic, {sac.n_step}-step targets, {batch.utd_ratio:g} updates per decision{matching}",
        "replay": f"{replay.replay_priority}, {replay.replay_capacity:,} decisions"
        + (f", {replay.her_ratio:g} relabelled copies of an episode" if replay.her_ratio else ""),
        "task": f"{setting.env.suite}, {names[0] if len(names) == 1 else f'{len(names)} tasks'}, {states:,} initial "
        f"states; success detector: {setting.success_source}",
        "reward": rewards,
        "episodes": f"{batch.num_episodes:,} = {batch.iterations} iterations of {batch.rollout_batch_size}, {first}",
        "folder": flags.run.save_path,
    }
    if trainer is not None:
        rows["ranks"] = f"{trainer.strategy.described}, with {flags.run.num_envs} environments each"
    return header("training", rows)
