"""Supervised fine-tuning, for `cli/train_sft_vla.py`: checks, model, trainer, and the final summary."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType, SimpleNamespace
from typing import Any

import numpy as np
import torch

from rlvla.algorithms.iql import RowWeights, awr_weights
from rlvla.checkpoints.policy_folder import PolicyRecord, learned_states, recorded_environment
from rlvla.commands.check_demos import warn_of
from rlvla.commands.custom_modules import CustomConfig, modules_with_suites, words_for_later_commands
from rlvla.commands.dry_run import sft_report
from rlvla.commands.model_checks import mismatch_with_policy
from rlvla.commands.new_models import (
    camera_map_problems,
    is_new,
    lerobot_facts,
    missing_of_new,
    new_chunk_len,
    new_model,
    new_model_problems,
    unnorm_key_problems,
)
from rlvla.commands.ppo_checks import untrainable
from rlvla.commands.run_policies import policy_folder
from rlvla.commands.setup import instruction_source, instructions_of, start_workers
from rlvla.commands.sft_runs import VERDICT_FILE
from rlvla.commands.supervised import claimed_folder, start_folder, supervised_header, supervised_problems
from rlvla.data.demonstrations import Demonstrations
from rlvla.data.reading import read_several
from rlvla.data.rows import rows_per_epoch
from rlvla.envs.config import EnvConfig, heldout_problems
from rlvla.envs.options import own_flags
from rlvla.envs.registry import get_suite, is_known
from rlvla.envs.splits import LearnedStates, UnseenStates
from rlvla.models.config import ActorConfig
from rlvla.models.dataset_statistics import narrow_dimensions
from rlvla.models.families import (
    Checkpoint,
    check_checkpoint,
    checkpoint_option_problems,
    checkpoint_overrides,
    family_of,
    recorded_guidance,
)
from rlvla.models.lerobot.processors import without_statistics
from rlvla.models.policy import Policy
from rlvla.models.vla.choices import REGRESSION
from rlvla.rollout import RolloutEngine
from rlvla.trainer.supervised.advantages import (
    advantage_labels,
    advantages_ahead,
    advantages_of_actions,
    rows_by_advantage,
)
from rlvla.trainer.supervised.config import NewModelConfig, SFTConfig, SFTRunConfig, ValidationConfig
from rlvla.trainer.supervised.return_model_trainer import LEAST_EXPLAINED, ReturnFacts, ReturnModelTrainer
from rlvla.trainer.supervised.sft_trainer import SFTTrainer
from rlvla.trainer.supervised.validation import Playing, percent, split_for_validation
from rlvla.trainer.supervised.verdict import Verdict
from rlvla.utils.cli.config_file import RUN_CONFIG_FILE, flag_arguments, write_config_file
from rlvla.utils.cli.flags import no_effect_problems, range_problems
from rlvla.utils.deepspeed.config import StrategyConfig, launched_rank, launched_world_size
from rlvla.utils.deepspeed.strategy import DeepspeedStrategy
from rlvla.utils.errors import ConfigError, Problem, require
from rlvla.utils.files import BestEffortWriter, unused_folder, write_json
from rlvla.utils.seeding import seed_everything
from rlvla.utils.terminal import duration, log, passing_note, quiet_libraries, show, suggest, table

_NOT_IN_SUMMARY = {"sft/lr", "perf/update_tokens_per_s"}


def run_sft(
    run: SFTRunConfig,
    sizes: NewModelConfig,
    config: SFTConfig,
    actor_config: ActorConfig,
    strategy_config: StrategyConfig,
    custom: CustomConfig,
    validation: ValidationConfig | None = None,
    given: Collection[str] = (),
    unselected: Mapping[str, Any] = MappingProxyType({}),
) -> Path | None:
    """Train and return the policy folder; None for a dry run.

    All configuration problems are raised before anything is started. `given` and `unselected` as for
    `no_effect_problems`.
    """
    validation = validation or ValidationConfig()
    run = replace(run, pretrain=policy_folder(run.pretrain, env_python=validation.env_python))
    groups = (run, sizes, config, actor_config, strategy_config, validation)
    problems = [*(p for part in groups for p in range_problems(part)), *supervised_problems(run, config)]
    problems += strategy_config.problems() + no_effect_problems(groups, unselected, given)
    problems += strategy_config.kernel_problems(actor_config.attn_implementation)
    if config.ema_decay:
        problems += strategy_config.sharding_problems("ema_decay", config.ema_decay)
    if run.load_checkpoint and Path(run.save_path, VERDICT_FILE).exists():
        text = f"--load_checkpoint: the run in {run.save_path} has ended; name another --save_path"
        problems.append(Problem("load_checkpoint", "changed", text))
    by_advantage = config.advantage_conditioning or config.advantage_weighting
    if by_advantage is not None:
        config = replace(config, autonomous_weight=1.0)
    demos = None
    try:
        demos = read_several(run.demos, run.cameras or None, options=run)
        rows = _demonstrated_rows(demos, range(len(demos.actions)))
        if rows < launched_world_size():
            shared = f"{rows} demonstrated decisions cannot be shared by {launched_world_size()} ranks"
            text = f"--demos {' '.join(run.demos)}: {shared}; use fewer ranks or more demonstrations"
            problems.append(Problem("demos", "too_few", text))
    except ConfigError as error:
        problems += error.problems
    try:
        if is_new(run.pretrain):
            problems += new_model_problems(run, sizes, demos, actor_config, given)
            problems += supervision_problems(missing_of_new(run, sizes), config)
        else:
            problems += _start_problems(run, sizes, demos, actor_config, config, given)
        if demos is not None:
            problems += _conditioning_problems(run, sizes, config, demos)
            problems += _weighting_problems(run, sizes, config, demos)
    except ConfigError as error:
        problems += error.problems
    episodes = None
    try:
        if demos is not None:
            problems += _heldout_problems(validation, demos, run.seed)
            problems += _unseen_problems(run, demos, validation.env_python)
            episodes = _episodes(validation, run, demos) if validation.eval_epochs else None
    except ConfigError as error:
        problems += error.problems
    if problems or demos is None:
        raise ConfigError(problems)
    if launched_rank() == 0:
        warn_of(demos, run.demos, run)
        _warn_of_narrow_dimensions(demos)
        _warn_of_another_suite(demos, run.pretrain)
        if config.autonomous_weight and by_advantage is None and demos.interventions is None:
            log.warning("--autonomous_weight has no effect: the demonstrations do not record who acted")
    if run.dry_run:
        if launched_rank() == 0:
            with _checkpoint(run, sizes, demos) as checkpoint:
                train, _ = split_for_validation(demos, validation, run.seed)
                by_policy = np.concatenate([demos.rows_by_policy(episode) for episode in train])
                rows = rows_per_epoch(by_policy, config.autonomous_weight)
                print(sft_report(checkpoint, demos, config, actor_config, strategy_config, rows, run.gpu_memory))
        return None
    if config.use_wandb:
        require("wandb", extra="wandb")
    quiet_libraries()
    with ExitStack() as stack:
        playing = None if episodes is None else episodes(modules_with_suites(custom), stack)
        strategy = DeepspeedStrategy(strategy_config, seed=run.seed)
        seed_everything(run.seed)
        stack.enter_context(claimed_folder(run, strategy))
        return _train(run, sizes, config, actor_config, strategy, demos, [*groups, custom], validation, playing)


def _train(
    run: SFTRunConfig,
    sizes: NewModelConfig,
    config: SFTConfig,
    actor_config: ActorConfig,
    strategy: DeepspeedStrategy,
    demos: Demonstrations,
    groups: Sequence[Any],
    validation: ValidationConfig,
    playing: Playing | None,
) -> Path:
    """Train with a checked configuration; `groups` are all groups of flags."""
    start = time.perf_counter()
    save_path = Path(run.save_path)
    pretrain = Path(run.pretrain)
    if is_new(run.pretrain) or run.fit_to_demos:
        pretrain = start_folder(run, strategy, lambda folder: _write_start(folder, demos, run, sizes))
    overrides = _overrides(pretrain, run, sizes, demos)
    if config.advantage_conditioning is not None:
        overrides |= family_of(pretrain).condition or {}
    with passing_note(f"loading {pretrain}"):
        checkpoint = check_checkpoint(pretrain, run.unnorm_key, overrides=overrides)
        actor: Any = checkpoint.load_policy(actor_config)
    checkpoint.begin_supervised(actor, mean_alone=config.trains_mean_alone)
    record = _record(demos, run, actor, learned_states(recorded_environment(pretrain)) or [])
    positive = None
    if config.advantage_conditioning is not None:
        positive = _positive_rows(demos, config, actor.spec.action_chunk_len, strategy)
        record, actor.guidance = replace(record, guidance=config.guidance), config.guidance
    weights = None
    if config.advantage_weighting is not None:
        weights = _row_weights(demos, config, actor.spec.action_chunk_len, strategy)
    trainer = SFTTrainer(
        actor,
        demos,
        strategy,
        config,
        save_path,
        record,
        run.fallback_path,
        validation,
        playing,
        positive,
        None if weights is None else weights.weights,
    )
    resumed = run.load_checkpoint and trainer.resume()
    if strategy.is_main:  # only now: a mismatching checkpoint must leave the old configuration
        write_config_file(save_path, groups)
    trainer.logger.describe(groups, outcomes=("sft/accuracy",))
    if weights is not None and not resumed:
        shares = {"sft/awr_effective_share": weights.effective, "sft/awr_clipped_share": weights.clipped}
        trainer.logger.log(shares, 0)
    if strategy.is_main:
        log.info(supervised_header("supervised training", run, config, actor, demos, strategy))
    metrics = trainer.fit()
    policy = trainer.exported
    if strategy.is_main:
        rows = [(name, f"{value:.4g}") for name, value in metrics.items() if name not in _NOT_IN_SUMMARY]
        print(table(("metric (last steps)", "value"), rows))
        assert trainer.verdict is not None
        show("\n".join(trainer.verdict.sentences))
        content = {name: getattr(trainer.verdict, name) for name in ("sentences", "missing", "rl")}
        BestEffortWriter(VERDICT_FILE).attempt(lambda: write_json(save_path / VERDICT_FILE, content))
        show(f"saved {policy} after {duration(time.perf_counter() - start)}")
        suggest(_next_command(trainer.verdict, policy, run, config, demos, validation.env_python))
    return policy


def _positive_rows(
    demos: Demonstrations, config: SFTConfig, action_chunk_len: int, strategy: DeepspeedStrategy
) -> np.ndarray:
    """[M] bool: the rows that get the condition."""
    assert config.advantage_conditioning is not None
    folder = return_model_folder(config.advantage_conditioning)
    facts = ReturnFacts.read(folder)
    with passing_note(f"advantages by {folder}"), torch.random.fork_rng(devices=[]):  # training draws as without
        labels = advantage_labels(
            facts.load_model(folder, strategy.device),
            facts.scales,
            demos,
            strategy.device,
            horizon=config.advantage_horizon * action_chunk_len,
            share=config.positive_share,
            demonstrations=config.label_demonstrations,
        )
    if strategy.is_main:
        own, positive = labels.by_advantage, labels.positive
        log.info(
            f"condition on {percent(positive.mean())} of {len(positive):,} rows: on {percent(positive[own].mean())} of "
            f"{int(own.sum()):,} by their advantage, on all {int((~own).sum()):,} of demonstrations and corrections"
        )
    return labels.positive


def _row_weights(
    demos: Demonstrations, config: SFTConfig, action_chunk_len: int, strategy: DeepspeedStrategy
) -> RowWeights:
    """Weights of advantage-weighted regression, computed by the main rank."""
    assert config.advantage_weighting is not None
    folder, weights = return_model_folder(config.advantage_weighting), None
    if strategy.is_main:
        facts = ReturnFacts.read(folder)
        with passing_note(f"advantages by {folder}"), torch.random.fork_rng(devices=[]):  # training draws as without
            model, device = facts.load_model(folder, strategy.device), strategy.device
            if facts.actions is None:
                horizon = config.advantage_horizon * action_chunk_len
                advantages = advantages_ahead(model, facts.scales, demos, device, horizon)
            else:
                advantages = advantages_of_actions(model, facts.actions, demos, device, action_chunk_len)
        weights = awr_weights(advantages, config.awr_temperature, config.awr_max_weight)
        log.info(
            f"advantage weights of {len(advantages):,} rows: effective sample size {percent(weights.effective)} of "
            f"them, {percent(weights.clipped)} clipped; advantages {advantages.mean():.3f} +- {advantages.std():.3f}"
        )
    return strategy.gather_objects(weights)[0]


def _weighting_problems(
    run: SFTRunConfig, sizes: NewModelConfig, config: SFTConfig, demos: Demonstrations
) -> Iterator[Problem]:
    """Problems of the return model of advantage-weighted regression; ConfigError for its files."""
    if config.advantage_weighting is None:
        return
    if config.advantage_conditioning is not None:
        text = "--advantage_weighting and --advantage_conditioning are alternatives; leave one out"
        yield Problem("advantage_weighting", "contradiction", text)
    yield from _return_model_problems("advantage_weighting", config.advantage_weighting, run, demos)
    folder = return_model_folder(config.advantage_weighting)
    learned, acting = check_checkpoint(folder).spec.action_chunk_len, _chunk_len(run, sizes, demos)
    if ReturnFacts.read(folder).actions is not None and acting != learned:
        text = f"--advantage_weighting {folder}: values of chunks of {learned} actions, and the policy's have {acting}"
        yield Problem("advantage_weighting", "mismatch", f"{text}; train it with --action_chunk_len {acting}")


def _chunk_len(run: SFTRunConfig, sizes: NewModelConfig, demos: Demonstrations) -> int:
    """Actions per decision of the policy to train."""
    if is_new(run.pretrain):
        return 1 if run.model_variant == "autoregressive" else new_chunk_len(sizes, demos)
    if run.fit_to_demos:
        return _before_refit(run, sizes).spec.action_chunk_len
    overrides = _overrides(run.pretrain, run, sizes, demos)
    return check_checkpoint(run.pretrain, run.unnorm_key, overrides=overrides).spec.action_chunk_len


def _conditioning_problems(
    run: SFTRunConfig, sizes: NewModelConfig, config: SFTConfig, demos: Demonstrations
) -> Iterator[Problem]:
    """Problems of the return model, and data or policies that cannot be conditioned; ConfigError for its files."""
    paths, start = " ".join(run.demos), run.pretrain
    conditioned = not is_new(start) and recorded_guidance(start) is not None
    if config.advantage_conditioning is None:
        if conditioned:
            text = f"--pretrain {start} is advantage-conditioned; give --advantage_conditioning, or start from an"
            yield Problem("pretrain", "conditioned", f"{text} unconditioned policy")
        return
    if not is_new(start):
        if reason := unconditionable(start, run.unnorm_key):
            yield Problem("advantage_conditioning", "mismatch", f"--advantage_conditioning: {reason}")
    elif run.model_variant == "autoregressive":
        text = "--advantage_conditioning: a policy that is --model_variant autoregressive takes no condition"
        yield Problem("advantage_conditioning", "mismatch", text)
    yield from _return_model_problems("advantage_conditioning", config.advantage_conditioning, run, demos)
    if not rows_by_advantage(demos, demonstrations=config.label_demonstrations).any():
        text = f"--advantage_conditioning: {paths} holds no episodes of a policy, so that all rows are positive; "
        text += "record some (collect_demos.py --policy --keep all), or give --label_demonstrations"
        yield Problem("demos", "no_own_episodes", text)


def unconditionable(folder: str | Path, unnorm_key: str | None) -> str | None:
    """Why a policy cannot be advantage-conditioned, as text; None if it can be."""
    if family_of(folder).condition is not None and not check_checkpoint(folder, unnorm_key).spec.token_by_token:
        return None
    return f"policies such as {folder} take no condition; take a compact, OFT or a LeRobot policy"


def _return_model_problems(flag: str, path: str, run: SFTRunConfig, demos: Demonstrations) -> Iterator[Problem]:
    """A return model that explains nothing or does not fit the data; `flag` names it, ConfigError for its files."""
    folder, paths = return_model_folder(path), " ".join(run.demos)
    facts = ReturnFacts.read(folder)
    if facts.explained_variance < LEAST_EXPLAINED:
        text = f"--{flag} {folder} explains {facts.explained_variance:.2f} of the variance of held-out returns, so "
        yield Problem(flag, "explains_nothing", f"{text}that advantages are noise; train a better one")
    if unknown := sorted(set(demos.instructions) - set(facts.scales)):
        text = f"--{flag} {folder} was not trained on {len(unknown)} task(s) of {paths}, such as {unknown[0]!r}"
        yield Problem(flag, "other_tasks", f"{text}; train it on all --demos")
    yield from mismatch_with_policy(demos, paths, check_checkpoint(folder).spec, str(folder))
    if not demos.success_recorded:
        yield Problem("demos", "mismatch", f"--demos {paths}: success is not recorded, which advantages depend on")


def return_model_folder(path: str) -> Path:
    """The folder of a return model, or that of its run."""
    inside = Path(path) / ReturnModelTrainer.name
    return inside if inside.is_dir() else Path(path)


def _warn_of_another_suite(demos: Demonstrations, pretrain: str) -> None:
    before = None if is_new(pretrain) else recorded_environment(pretrain).get("task_suite_name")
    now = demos.env_args.get("task_suite_name")
    if before and now and before != now:
        text = "--demos were recorded in %s, and %s was trained in %s; the new policy will be one for %s"
        log.warning(text, now, pretrain, before, now)


def _next_command(
    verdict: Verdict,
    policy: Path,
    run: SFTRunConfig,
    config: SFTConfig,
    demos: Demonstrations,
    env_python: str | None,
) -> str:
    """The command that the verdict suggests: reinforcement learning, more epochs or data, or an evaluation."""
    more, save_path = words_for_later_commands(env_python), Path(run.save_path)
    pretrain = f"--pretrain {shlex.quote(str(policy))}"

    def beside(name: str) -> str:
        return shlex.quote(str(unused_folder(save_path.parent / f"{save_path.resolve().name}_{name}")))

    as_it_is = verdict.rl in ("ready", "saturated") or (verdict.rl is None and verdict.learned)
    first = None if as_it_is else verdict.missing[:1]
    if first == ("epochs",):
        longer = f"--max_epochs {2 * config.max_epochs}"
        longer += "" if config.max_steps is None else f" --max_steps {2 * config.max_steps}"
        longer += "" if config.max_minutes is None else f" --max_minutes {2 * config.max_minutes:g}"
        again = f"--config {shlex.quote(str(save_path / RUN_CONFIG_FILE))} {longer}"
        return f"python cli/train_sft_vla.py {again} --save_path {beside('longer')}"
    if not is_known(str(demos.env_args.get("task_suite_name"))):  # e.g. the folder name of a dataset made elsewhere
        return f"python cli/inspect_vla.py {pretrain}{more}"
    if first == ("data",):
        argv = _environment_flags(demos)
        argv.append(f"--num_demos={2 * len(demos.actions) // max(1, len(demos.env_args.get('task_ids') or ()))}")
        return f"python cli/collect_demos.py {shlex.join(argv)} --output {beside('demos')}{more}"
    if verdict.rl in ("ready", "slow"):
        return f"python cli/train_ppo_vla.py {pretrain} --save_path {beside('ppo')}{more}"
    return f"python cli/eval_vla.py {pretrain}{more}"


def _warn_of_narrow_dimensions(demos: Demonstrations) -> None:
    for part, dims in narrow_dimensions(next(iter(demos.statistics.values()))).items():
        numbers = ", ".join(map(str, dims))
        log.warning(
            f"demonstrations: {part} dimension(s) {numbers} have one value in nearly all steps (q01 and q99 coincide); "
            "a new policy normalizes them by minimum and maximum"
        )


def _environment_flags(demos: Demonstrations) -> list[str]:
    """The flags of the environment of the demonstrations; those at their default are left out."""
    size = {"image_size": demos.image_shape[0], "use_proprio": demos.proprio is not None}
    env = EnvConfig().completed(demos.env_args | size)
    options = get_suite(env.suite).options
    defaults = {"use_proprio": False} | {name: f.default for name, f in (own_flags(options) if options else {}).items()}
    chosen = {n: value for n, value in env.as_dict().items() if value not in ((), []) and value != defaults.get(n)}
    return [token for name, value in chosen.items() for token in flag_arguments(name, value)]


def _unseen_problems(run: SFTRunConfig, demos: Demonstrations, env_python: str | None) -> list[Problem]:
    """Tasks of --heldout_tasks that the demonstrations hold, or that the initial policy has learned from."""
    env = replace(EnvConfig().completed(demos.env_args), env_python=env_python)  # which lists the tasks
    sources = {" ".join(run.demos): demos.states_learned_from}
    if not is_new(run.pretrain):
        sources[f"the policy {run.pretrain}"] = learned_states(recorded_environment(run.pretrain)) or []
    problems = [p for name, seen in sources.items() for p in heldout_problems(run.heldout_tasks, env, (), seen, name)]
    return list(dict.fromkeys(problems))


def _episodes(
    validation: ValidationConfig, run: SFTRunConfig, demos: Demonstrations
) -> Callable[[Sequence[str], ExitStack], Playing]:
    """Check the episodes to play during training; the result starts the workers, which end with a stack.

    Raises:
        ConfigError: they cannot be played in the suite of the demonstrations, or too few initial states are left.
    """
    new = is_new(run.pretrain)
    reads_proprio = run.use_proprio and demos.proprio is not None
    if not new:
        with suppress(ConfigError):  # reported with the checkpoint
            reads_proprio = bool(check_checkpoint(run.pretrain, run.unnorm_key).spec.proprio_dim)
    inputs = {"cameras": list(run.cameras or demos.env_args["cameras"]), "use_proprio": reads_proprio}
    inputs["image_size"] = demos.env_args.get("image_size") or demos.image_shape[0]
    env = replace(EnvConfig().completed(demos.env_args | inputs), env_python=validation.env_python)
    try:
        tasks = env.tasks()
    except ConfigError as error:
        why = f"episodes cannot be played in the suite of the demonstrations: {'; '.join(map(str, error.problems))}"
        raise ConfigError.of("eval_epochs", "unavailable", f"--eval_epochs {validation.eval_epochs}: {why}") from error
    problems, differences = instructions_of(env, tasks)[1], []
    suites = sorted({states.suite for states in demos.states_learned_from if states.recorded})
    if len(suites) > 1:
        differences.append(f"the demonstrations are of several suites, {', '.join(suites)}")
    dims, demonstrated = sorted({task.action_dim for task in tasks}), demos.actions[0].shape[1]
    if dims != [demonstrated]:
        differences.append(f"actions of {env.suite} have {dims} dimensions, those of the demonstrations {demonstrated}")
    flag = f"--eval_epochs {validation.eval_epochs}"
    problems += [Problem("eval_epochs", "mismatch", f"{flag}: {why}; leave it out") for why in differences]
    demonstrated_states: dict[int, set[int]] = {}
    for task_id, state in demos.init_states:
        demonstrated_states.setdefault(task_id, set()).add(state)
    before = () if new else tuple(learned_states(recorded_environment(run.pretrain)) or ())
    states = UnseenStates({task: frozenset(ids) for task, ids in demonstrated_states.items()}, before)
    for task in tasks:
        try:
            states.eval_states(task, validation.eval_episodes)
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(problems)

    def start(modules: Sequence[str], stack: ExitStack) -> Playing:
        pool = stack.enter_context(start_workers(validation.num_envs, env, tasks, modules))
        source = instruction_source(env)
        rollout = RolloutEngine(pool, env.env_kwargs(), {"success": 1.0}, tasks=tasks, instructions=source)
        return Playing(rollout, tasks, states, validation.eval_episodes, validation.eval_samples, load)

    def load(folder: Path) -> Policy:
        return check_checkpoint(folder, run.unnorm_key).load_policy().eval()

    return start


def _heldout_problems(validation: ValidationConfig, demos: Demonstrations, seed: int) -> list[Problem]:
    """Problems if the share leaves nothing to train on, or nothing to measure."""
    if not 0 < validation.heldout_share < 1:
        return []
    train, heldout = (_demonstrated_rows(demos, side) for side in split_for_validation(demos, validation, seed))
    if heldout and train >= launched_world_size():
        return []
    states = len(set(demos.init_states)) or len(demos.actions)
    text = f"--heldout_share {validation.heldout_share} of {states} initial state(s) leaves nothing to "
    text += f"{'train on' if heldout else 'measure'}; give another share, or more demonstrations"
    return [Problem("heldout_share", "too_few", text)]


@contextmanager
def _checkpoint(run: SFTRunConfig, sizes: NewModelConfig, demos: Demonstrations) -> Iterator[Checkpoint]:
    """The checkpoint to train; a new model is built in a temporary folder for the duration of the block."""
    if not is_new(run.pretrain) and not run.fit_to_demos:
        yield check_checkpoint(run.pretrain, run.unnorm_key, overrides=_overrides(run.pretrain, run, sizes, demos))
        return
    with TemporaryDirectory() as folder:
        _write_start(Path(folder), demos, run, sizes)
        yield check_checkpoint(folder, run.unnorm_key)


def _record(demos: Demonstrations, run: SFTRunConfig, actor: Policy, before: Sequence[LearnedStates]) -> PolicyRecord:
    """The record of the trained policy, with the initial states of the demonstrations and of the checkpoint."""
    inputs = {
        "cameras": list(run.cameras or demos.env_args["cameras"]),
        "use_proprio": bool(actor.spec.proprio_dim),
    }
    return PolicyRecord(EnvConfig().completed(demos.env_args | inputs), (*before, *demos.states_learned_from))


def _overrides(
    folder: str | Path, run: SFTRunConfig, sizes: NewModelConfig, demos: Demonstrations | None
) -> dict[str, Any]:
    """Settings that replace those of a checkpoint folder; without `demos`, not its cameras."""
    cameras = () if demos is None else run.cameras or demos.env_args.get("cameras") or ()
    flags = SimpleNamespace(
        center_crop=run.center_crop,
        model_variant=run.model_variant,
        platform=run.platform,
        action_std=run.action_std,
        action_std_init=run.action_std_init,
        action_chunk_len=sizes.action_chunk_len,
        camera_map=run.camera_map if demos is not None else (),
    )
    # Fine-tuning may add a regression head to a checkpoint with action tokens.
    given = checkpoint_overrides(Path(folder), flags, cameras)
    return {**given, "new_head": True} if run.model_variant == REGRESSION else given


def _start_problems(
    run: SFTRunConfig,
    sizes: NewModelConfig,
    demos: Demonstrations | None,
    actor_config: ActorConfig,
    sft: SFTConfig,
    given: Collection[str],
) -> list[Problem]:
    """Problems if the initial checkpoint is incomplete or does not fit the demonstrations."""
    if run.fit_to_demos:
        checkpoint = _before_refit(run, sizes)
    else:
        overrides = _overrides(run.pretrain, run, sizes, demos)
        checkpoint = check_checkpoint(run.pretrain, run.unnorm_key, overrides=overrides)
    spec = checkpoint.spec
    problems = [*checkpoint_option_problems(checkpoint, actor_config, given), *supervision_problems(spec.missing, sft)]
    if sizes.action_chunk_len not in (None, spec.action_chunk_len):
        text = f"--action_chunk_len {sizes.action_chunk_len}: the checkpoint predicts {spec.action_chunk_len}"
        problems.append(Problem("action_chunk_len", "mismatch", text))
    if demos is not None and run.fit_to_demos:
        problems += _fit_problems(checkpoint, demos, run, sizes)
    elif demos is not None:
        problems += mismatch_with_policy(demos, " ".join(run.demos), spec, run.pretrain)
    return problems


def _fit_problems(
    checkpoint: Checkpoint, demos: Demonstrations, run: SFTRunConfig, sizes: NewModelConfig
) -> list[Problem]:
    """Why the weights of a checkpoint cannot be used for these demonstrations."""
    problems = camera_map_problems(run, demos)
    wrong = unnorm_key_problems(run, demos)
    if demos.proprio is None:
        text = f"--fit_to_demos: {' '.join(run.demos)} has no proprioception, which the policy reads"
        wrong.append(Problem("fit_to_demos", "no_state", text))
    return problems + (wrong or checkpoint.refitted(None, lerobot_facts(demos, run, sizes)))


def _before_refit(run: SFTRunConfig, sizes: NewModelConfig) -> Checkpoint:
    """The folder of a run with `--fit_to_demos`: its cameras and statistics, and their name, are to be replaced."""
    with without_statistics():
        return check_checkpoint(run.pretrain, overrides=_overrides(run.pretrain, run, sizes, None))


def _write_start(folder: Path, demos: Demonstrations, run: SFTRunConfig, sizes: NewModelConfig) -> None:
    """Write a new model, or the initial policy of a run with `--fit_to_demos`."""
    if run.fit_to_demos:
        _before_refit(run, sizes).refitted(folder, lerobot_facts(demos, run, sizes))
    else:
        new_model(folder, demos, run, sizes, run.model_variant)


def supervision_problems(missing: Mapping[str, str], config: SFTConfig) -> list[Problem]:
    """Settings of a supervised loss that the policy does not have; `missing` as in `PolicySpec`."""
    given = {"label_smoothing": config.label_smoothing, "sft_loss": config.sft_loss}
    return untrainable(missing) + [
        Problem(name, "mismatch", f"--{name} does not work with this policy: {missing[name]}; leave it out")
        for name, value in given.items()
        if value and name in missing
    ]


def _demonstrated_rows(demos: Demonstrations, episodes: Sequence[int]) -> int:
    """Number of training rows of these episodes in which a person or an expert acted."""
    return sum(int((~demos.rows_by_policy(episode)).sum()) for episode in episodes)
