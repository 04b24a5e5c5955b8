"""The memory plan of --dry_run against measurements.

python benchmarks/memory_plan.py
python benchmarks/memory_plan.py --sizes "compact flow" smolvla
deepspeed -q --num_accelerators 2 benchmarks/memory_plan.py --sizes "3 M"

Bytes of live tensors on one rank: what `rlvla.memory.plan` predicts from shapes alone, and what a real actor and critic
(with `--judges` also a reference and a reward model) hold between two updates, and at their peaks during an optimizer
step, while playing, and while scoring decisions. The measurement counts each storage that any operation has touched
once, see `rlvla.memory.probe`. What --offload_during_rollout moves to the host is counted in DeepSpeed's engines,
tensor by tensor.
"""

from __future__ import annotations

import argparse
import gc
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.random_policies import POLICIES, SIZES, new_policy, random_rows
from benchmarks.train_step import OPTIM
from rlvla.experience import Experience
from rlvla.memory.plan import FrozenMemory, MemoryPlan, engine_memory, frozen_memory
from rlvla.memory.probe import Probe, probe
from rlvla.models.config import ActorConfig
from rlvla.models.families import Checkpoint, check_checkpoint
from rlvla.models.footprint import LiveBytes
from rlvla.models.reference import ReferenceModel
from rlvla.trainer.algorithm_config import AlgorithmConfig
from rlvla.trainer.config import BatchConfig
from rlvla.trainer.metrics import Metrics
from rlvla.trainer.models import Models
from rlvla.trainer.scoring import ModelPasses, Networks
from rlvla.trainer.updater import Updater
from rlvla.utils.deepspeed.config import StrategyConfig, launched_rank, launched_world_size
from rlvla.utils.deepspeed.engine import Engine
from rlvla.utils.deepspeed.strategy import DeepspeedStrategy
from rlvla.utils.terminal import quiet_libraries, table

HEADERS = ("model", "flags", "between updates", "update", "playing", "scoring", "can wait on the host", "worst ratio")


@dataclass(frozen=True)
class Comparison:
    """Planned and measured bytes.

    Attributes:
        phases: between updates (rest), most in an update, while playing and scoring, and what can wait on the host
            meanwhile, by name.
    """

    phases: dict[str, tuple[int, int]]

    @property
    def ratios(self) -> dict[str, float]:
        """Planned / measured by phase."""
        return {name: planned / measured for name, (planned, measured) in self.phases.items()}


def compare(
    folder: Path,
    strategy_config: StrategyConfig,
    actor_config: ActorConfig,
    *,
    rows: int = 16,
    micro: int = 16,
    judges: bool = False,
) -> Comparison:
    """Plan; then train two optimizer steps of `rows` decisions in micro-batches of `micro`, play and score, and look.

    Args:
        folder: of the policy from which all models are loaded.
        strategy_config: DeepSpeed.
        actor_config: adapters and memory options.
        rows: decisions of an optimizer step; as many are scored.
        micro: of a micro-batch, of a pass that scores, and answered at once.
        judges: with a reference (a model of its own, whatever the adapters) and a reward model.
    """
    strategy = DeepspeedStrategy(strategy_config)
    checkpoint = check_checkpoint(folder)
    batch = random_rows(checkpoint.load_policy(actor_config), rows)
    sizes = {"bf16": strategy_config.bf16, "judges": judges}
    probes = probe_models(checkpoint, actor_config, batch.instructions[:1], micro, **sizes)
    plan, on_cpu = (
        plan_for(*probes, config, strategy.world_size, accumulates=rows > micro)
        for config in (strategy_config, replace(strategy_config, param_offload=False))  # there the host is the device
    )
    gc.collect()
    live = LiveBytes()
    with live:
        engines = {
            "actor": strategy.prepare(checkpoint.load_policy(actor_config), OPTIM),
            "critic": strategy.prepare(checkpoint.load_critic(actor_config.without_adapters()), OPTIM),
        }
        reference = ReferenceModel(checkpoint.load_policy()) if judges else None
        frozen = Models(engines["actor"].module, None, reference)
        for model in frozen.frozen:
            strategy.prepare_frozen(model)
            live.count(list(model.parameters()), list(model.buffers()))
        reward_model = new_reward_model(checkpoint, strategy) if judges else None
        if reward_model is not None:
            live.count(list(reward_model.parameters()), list(reward_model.buffers()))
        for engine in engines.values():
            live.count(list(engine.module.parameters()), list(engine.module.buffers()))
        settings = BatchConfig(micro_train_batch_size=micro, micro_rollout_batch_size=micro)
        updater = Updater(strategy, settings, AlgorithmConfig(), engines["actor"].module)
        step = batch.with_fields(value_mask=batch.action_mask, values=batch.advantages, returns=batch.advantages)
        passes = ModelPasses(
            Networks(engines["actor"], engines["critic"], reference), strategy, settings, AlgorithmConfig()
        )
        measured: dict[str, int] = {}
        # Adam's moments are made in the first step; ZeRO-3 knows from its second pass on what is needed.
        for _ in range(3):
            with peak_of(live, "update", measured):
                metrics = Metrics()
                updater.policy_step(engines["actor"], step, 0.0, metrics, first_of_iteration=False)
                updater.value_step(engines["critic"], step, metrics)
            gc.collect()
            measured["rest"] = live.now
            with peak_of(live, "playing", measured):
                play(passes, reward_model, batch, micro)
            with peak_of(live, "scoring", measured):
                passes.scores(batch)
    if strategy_config.engine_stage > 0 and not strategy_config.adam_offload:  # otherwise a run is refused
        measured["waiting"] = waiting_bytes(engines, frozen)
    found = {**phase_bytes(on_cpu.in_one_place()), "waiting": replace(plan, offloads=True).away}
    return Comparison({name: (size, measured[name]) for name, size in found.items() if name in measured})


def new_reward_model(checkpoint: Checkpoint, strategy: DeepspeedStrategy) -> Any:
    """As the source of `--reward_pretrain` holds it: whole, here always on the device."""
    model = checkpoint.load_reward_model(new=True).requires_grad_(False).eval().to(strategy.device)
    return model.bfloat16() if strategy.config.bf16 else model


def phase_bytes(plan: MemoryPlan) -> dict[str, int]:
    """What the plan says by phase."""
    return {
        "rest": sum(model.at_rest for model in (*plan.engines.values(), *plan.frozen.values())),
        "update": plan.at_update,
        "playing": plan.at_playing,
        "scoring": plan.at_scoring,
    }


def probe_models(
    checkpoint: Checkpoint, actor_config: ActorConfig, instructions: list[str], micro: int, *, bf16: bool, judges: bool
) -> tuple[dict[str, Probe], dict[str, Probe]]:
    """Actor and critic; reference and reward model, if there are `judges`."""
    row, beside = checkpoint.row_shape(instructions, 1), actor_config.without_adapters()
    amounts = {"bf16": bf16, "forward_rows": micro}
    trained = {
        "actor": probe(checkpoint.sketch(row, actor_config), train_rows=micro, play_rows=micro, **amounts),
        "critic": probe(checkpoint.sketch(row, beside, scalar_head=True), train_rows=micro, **amounts),
    }
    heads = {"reference": False, "reward model": True} if judges else {}
    frozen = {
        name: probe(checkpoint.sketch(row, ActorConfig(), scalar_head=head), train_rows=0, **amounts)
        for name, head in heads.items()
    }
    return trained, frozen


def plan_for(
    trained: dict[str, Probe], frozen: dict[str, Probe], strategy: StrategyConfig, world: int, *, accumulates: bool
) -> MemoryPlan:
    """The plan for models that were probed."""
    return MemoryPlan(
        {name: engine_memory(p, strategy, world, accumulates=accumulates) for name, p in trained.items()},
        {
            name: frozen_memory(p, strategy, world)
            if name == "reference"
            else FrozenMemory(p.weight_bytes, source=True)
            for name, p in frozen.items()
        },
        passes={name: p.forward_bytes for name, p in {**trained, **frozen}.items()},
        decision=trained["actor"].decision_bytes,
    )


def waiting_bytes(engines: dict[str, Engine], models: Models) -> int:
    """Bytes on this rank of what `Offloading` sends to the host, as DeepSpeed's engines hold it; from ZeRO-1 on."""
    found: list[torch.Tensor] = []
    for name, engine in engines.items():
        zero = engine.engine.optimizer
        found += [value for state in zero.optimizer.state.values() for value in state.values() if value.dim()]
        if engine.config.zero_stage < 3:
            found += zero.single_partition_of_fp32_groups
            found += zero.bit16_groups_flat if name == "critic" else []
    for model in models.frozen:
        found += model.buffers()
        for parameter in model.parameters():
            shared = engines["actor"].config.param_offload and hasattr(parameter, "ds_tensor")  # it is there already
            found += [parameter, *([parameter.ds_tensor] if hasattr(parameter, "ds_tensor") and not shared else [])]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in found}
    return sum(storages.values())


@contextmanager
def peak_of(live: LiveBytes, name: str, measured: dict[str, int]) -> Iterator[None]:
    """Notes the most bytes alive inside the block."""
    gc.collect()
    live.reset_peak()
    yield
    measured[name] = live.peak


def play(passes: ModelPasses, reward_model: Any, batch: Experience, rows: int) -> None:
    """Answer as many observations as the rollout would, and let the reward model judge some."""
    actor = passes.networks.actor
    proprio = None if batch.proprio is None else batch.proprio[:rows].numpy()
    rng = np.random.default_rng(0)
    draws = np.stack([actor.module.spec.draw(rng) for _ in range(min(rows, len(batch)))])
    actor.train(False)
    with actor.full_parameters() as policy, torch.no_grad():
        policy.act(batch.images[:rows].numpy(), proprio, batch.instructions[:rows], noise=draws)
    if reward_model is not None:
        reward_model.success_probability(batch.index(torch.arange(rows)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=POLICIES, default=tuple(SIZES), help="models")
    parser.add_argument("--rows", type=int, default=16, help="decisions per optimizer step (default 16)")
    parser.add_argument("--micro", type=int, default=16, help="decisions per micro-batch (default 16)")
    parser.add_argument("--judges", action="store_true", help="with a reference and a reward model")
    parser.add_argument("--only", nargs="+", default=[""], help="variants with one of these, e.g. lora (default all)")
    parser.add_argument("--local_rank", type=int, default=-1, help="set by the deepspeed launcher")
    flags = parser.parse_args()
    torch.set_num_threads(1)
    quiet_libraries()
    variants = [({"zero_stage": stage, "bf16": bf16}, {}) for bf16 in (False, True) for stage in (0, 1, 2, 3)]
    variants += [({"zero_stage": stage, "bf16": True, "adam_offload": True}, {}) for stage in (2, 3)]
    variants += [({"zero_stage": 3, "bf16": True, "param_offload": True}, {})]
    variants += [({"zero_stage": stage}, {"lora_rank": 16}) for stage in (0, 2, 3)]
    variants += [({"zero_stage": stage}, {"gradient_checkpointing": True}) for stage in (0, 2, 3)]
    found = []
    for size in flags.sizes:
        with tempfile.TemporaryDirectory() as folder:
            new_policy(Path(folder), size)
            for strategy, actor in variants:
                name = " ".join(f"{key}={value}" for key, value in {**strategy, **actor}.items())
                if not any(part in name for part in flags.only):
                    continue
                amounts = {"rows": flags.rows, "micro": flags.micro, "judges": flags.judges}
                result = compare(Path(folder), StrategyConfig(**strategy), ActorConfig(**actor), **amounts)
                sizes = [f"{a / 2**20:.0f} / {b / 2**20:.0f}" for a, b in result.phases.values()]
                sizes += [""] * (len(HEADERS) - 3 - len(sizes))  # nothing can wait
                worst = max(result.ratios.values(), key=lambda ratio: abs(ratio - 1))
                found.append((size, name, *sizes, f"{worst:.2f}"))
                if launched_rank() == 0:
                    print(*found[-1], flush=True)
    if launched_rank() == 0:
        print(f"{launched_world_size()} rank(s); planned / measured MiB\n{table(HEADERS, found)}")


if __name__ == "__main__":
    main()
