"""`--dry_run --hours`: hours of GPU time of a run, from measured decisions per second.

`benchmarks/gpu.py` measures the rates; rlvla ships `gpu_rates.json`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlvla.memory.plan import MemoryPlan
from rlvla.models.families import type_of
from rlvla.trainer.algorithm_config import STATE, learner_needs_critic, learner_needs_reference
from rlvla.utils.data_files import fits, read_json
from rlvla.utils.deepspeed.config import launched_world_size
from rlvla.utils.errors import ConfigError
from rlvla.utils.terminal import table

if TYPE_CHECKING:
    from rlvla.commands.ppo_flags import PPORun
    from rlvla.commands.setup import CheckedRun

SHIPPED = Path(__file__).with_name("gpu_rates.json")
SAME_SIZE = 0.25  # largest relative difference in parameters between the policy and the measured one
PHASES = ("acting", "acting_with_graphs", "scoring", "update")


@dataclass(frozen=True)
class Rates:
    """Measured decisions per second of one policy on one device.

    Attributes:
        device: name of the GPU.
        title: of the policy.
        family: `model_type` or `type` of its config.json.
        trained: "lora", "expert" or "all".
        parameters: number of parameters.
        tokens: length of the sequence of a decision.
        acting: batch size -> decisions per second of rollouts.
        acting_with_graphs: the same with `--cuda_graphs`.
        scoring: batch size -> decisions per second of a pass that gives log-probs.
        update: decisions per micro-batch -> decisions per second of optimizer steps.
    """

    device: str
    title: str
    family: str
    trained: str
    parameters: int
    tokens: int
    acting: Mapping[int, float]
    acting_with_graphs: Mapping[int, float]
    scoring: Mapping[int, float]
    update: Mapping[int, float]


def rate_at(rates: Mapping[int, float], batch: int) -> float:
    """Decisions per second at a batch size: linear between the measured ones, in proportion below, constant above."""
    sizes = sorted(rates)
    at = bisect_left(sizes, batch)
    if at == 0:
        return rates[sizes[0]] * batch / sizes[0]
    if at == len(sizes):
        return rates[sizes[-1]]
    low, high = sizes[at - 1], sizes[at]
    share = (batch - low) / (high - low)
    return (1 - share) * rates[low] + share * rates[high]


def read_rates(path: Path) -> list[Rates]:
    """Rates from a file of `benchmarks/gpu.py`, without policies of which a phase did not fit in memory.

    Raises:
        ConfigError: the file is missing or not one of these.
    """
    if not path.is_file():
        text = f"--measured {path}: no such file; python benchmarks/gpu.py --output DIR writes DIR/rates.json"
        raise ConfigError.of("measured", "missing", text)
    try:
        rates = [_rates(entry) for entry in read_json(path)["policies"]]
        return [entry for entry in rates if entry.acting and entry.scoring and entry.update]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        text = f"--measured {path} is not a rates.json of benchmarks/gpu.py ({type(error).__name__}: {error})"
        raise ConfigError.of("measured", "invalid_file", text) from None


def _rates(entry: Mapping[str, Any]) -> Rates:
    values = {field.name: entry[field.name] for field in fields(Rates)}
    for name in PHASES:
        values[name] = {int(batch): float(rate) for batch, rate in values[name].items()}
        if any(batch < 1 or not rate > 0 for batch, rate in values[name].items()):
            raise ValueError(f"{name} must be positive decisions per second at positive batch sizes")
    if not all(fits(values[name], int) and values[name] > 0 for name in ("parameters", "tokens")):
        raise ValueError("parameters and tokens must be positive integers")
    return Rates(**values)


def hours_report(flags: PPORun, setting: CheckedRun, plan: MemoryPlan | None) -> str:
    """The table of hours on each measured device, or why there is none."""
    measured = read_rates(SHIPPED if flags.run.measured is None else Path(flags.run.measured))
    trained = "lora" if flags.actor.lora_rank else "expert" if flags.actor.train_expert_only else "all"
    family = type_of(setting.checkpoint.folder)
    parameters = 0 if plan is None else plan.engines["actor"].weights // (2 if flags.strategy.bf16 else 4)
    instructions = [task.instruction for task in setting.tasks]
    tokens = max(setting.checkpoint.row_tokens(instructions, len(setting.env.camera_names)))
    matching = [
        rates
        for rates in measured
        if (rates.family, rates.trained) == (family, trained)
        and abs(rates.parameters - parameters) < SAME_SIZE * rates.parameters
    ]
    if not matching or not flags.strategy.bf16:
        known = ", ".join(dict.fromkeys(f"{rates.title} ({rates.device})" for rates in measured))
        what = f"{family} with {parameters / 1e6:,.0f} M parameters, training {trained}"
        what += "" if flags.strategy.bf16 else ", in float32"
        return (
            f"hours: no rates were measured for {what}; measured in bfloat16: {known}. "
            "Measure your GPU with python benchmarks/gpu.py --output DIR and give --measured DIR/rates.json"
        )
    closest = {rates.device: rates for rates in sorted(matching, key=lambda rates: -abs(rates.tokens - tokens))}
    return "\n\n".join(table(*_hours(rates, flags, setting, tokens)) for rates in closest.values())


def rows_per_micro_batch(flags: PPORun, setting: CheckedRun) -> int:
    """Decisions per forward and backward pass of an update."""
    if not flags.batch.use_dynamic_batch:
        return flags.batch.micro_train_batch_size
    instructions = [task.instruction for task in setting.tasks]
    tokens = setting.checkpoint.row_tokens(instructions, len(setting.env.camera_names))
    return flags.batch.train_max_tokens_per_gpu // max(tokens)


def _hours(
    rates: Rates, flags: PPORun, setting: CheckedRun, tokens: int
) -> tuple[tuple[str, str], list[tuple[str, str]]]:
    """Heads and rows for one device; numbers of decisions are upper bounds, since episodes may end early."""
    batch, world = flags.batch, launched_world_size()
    max_decisions = max(-(-task.max_steps // setting.spec.action_chunk_len) for task in setting.tasks)
    decisions = batch.episodes_per_iteration * max_decisions / world * tokens / rates.tokens
    together = min(flags.rollout.rollout_max_batch or flags.run.num_envs, flags.run.num_envs)
    acting = rates.acting_with_graphs if flags.rollout.cuda_graphs and rates.acting_with_graphs else rates.acting
    algorithm = flags.algorithm
    critic = learner_needs_critic(algorithm) and not algorithm.share_backbone and algorithm.critic_input != STATE
    passes, micro = 1 + critic + learner_needs_reference(flags.algorithm), rows_per_micro_batch(flags, setting)
    seconds = {
        "acting in full batches, without simulators": decisions / rate_at(acting, together),
        "scoring": passes * decisions / rate_at(rates.scoring, batch.micro_rollout_batch_size),
        "update": (1 + critic) * batch.max_epochs * decisions / rate_at(rates.update, micro),
    }
    iteration = sum(seconds.values())
    rows = [(f"{name}, seconds per iteration", f"{value:.0f}") for name, value in seconds.items()]
    rows.append(("an iteration, minutes", f"{iteration / 60:.1f}"))
    rows.append((f"the run of {batch.iterations} iterations, hours", f"{iteration * batch.iterations / 3600:.1f}"))
    return (f"time for the decisions above on {rates.device}, from the rates of {rates.title}", ""), rows
