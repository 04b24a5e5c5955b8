"""The memory plan of --dry_run against what is measured.

python benchmarks/memory_plan.py
deepspeed -q --num_accelerators 2 benchmarks/memory_plan.py --sizes "2 M"

Compared are bytes of live tensors on one rank: what `rlvla.trainer.memory_plan` says from the shapes alone, and what a
real actor and critic hold between two updates, and at most during an optimizer step of the trainer. The measured figure
counts each storage once that any operation has touched, see `rlvla.utils.live_bytes`.
"""

from __future__ import annotations

import argparse
import gc
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.random_policies import SIZES, new_policy, random_rows
from benchmarks.train_step import OPTIM
from rlvla.models.actor import Actor, ActorConfig
from rlvla.models.value_models import Critic
from rlvla.trainer.config import AlgorithmConfig, BatchConfig
from rlvla.trainer.memory_plan import MemoryPlan, engine_memory
from rlvla.trainer.memory_probe import RowShape, probe
from rlvla.trainer.metrics import Metrics
from rlvla.trainer.updates import Updater
from rlvla.utils.live_bytes import LiveBytes
from rlvla.utils.logging import quiet_libraries, table
from rlvla.utils.strategy import DeepspeedStrategy, StrategyConfig
from rlvla.utils.strategy_config import launched_rank, launched_world_size


@dataclass(frozen=True)
class Comparison:
    """Planned and measured bytes, between updates and at most in an update."""

    planned_rest: int
    measured_rest: int
    planned_update: int
    measured_update: int

    @property
    def ratios(self) -> tuple[float, float]:
        """Planned / measured: between updates, in an update."""
        return self.planned_rest / self.measured_rest, self.planned_update / self.measured_update


def compare(
    folder: Path,
    strategy_config: StrategyConfig,
    actor_config: ActorConfig,
    *,
    rows: int = 16,
    micro: int = 16,
) -> Comparison:
    """Plan, then train two optimizer steps of `rows` decisions in micro-batches of `micro`, and look."""
    strategy = DeepspeedStrategy(strategy_config)
    actor = Actor.from_pretrained(folder, actor_config)
    inputs, config, batch = actor.inputs, actor.inputs.config, random_rows(actor, rows)
    shape = RowShape(1, inputs.prompt(batch.instructions[:1], torch.device("cpu"))[0].shape[1])
    amounts = {"bf16": strategy_config.bf16, "train_rows": micro, "forward_rows": micro}
    beside = actor_config.without_adapters()
    probes = {
        "actor": probe(config, shape, actor_config, **amounts),
        "critic": probe(config, shape, beside, scalar_head=True, **amounts),
    }
    accumulates = rows > micro
    world = strategy.world_size
    plan = MemoryPlan({n: engine_memory(p, strategy_config, world, accumulates=accumulates) for n, p in probes.items()})
    del actor
    gc.collect()
    live = LiveBytes()
    with live:
        engines = {
            "actor": strategy.prepare(Actor.from_pretrained(folder, actor_config), OPTIM),
            "critic": strategy.prepare(Critic.from_pretrained(folder, config=beside), OPTIM),
        }
        for engine in engines.values():
            live.see(list(engine.module.parameters()), list(engine.module.buffers()))
        updater = Updater(strategy, BatchConfig(micro_train_batch_size=micro), AlgorithmConfig(), 7, inputs)
        step = batch.with_fields(value_mask=batch.action_mask, values=batch.advantages, returns=batch.advantages)
        for _ in range(2):  # Adam's moments are made in the first step
            gc.collect()
            live.reset_peak()
            metrics = Metrics()
            updater.policy_step(engines["actor"], step, 0.0, metrics, first_of_iteration=False)
            updater.value_step(engines["critic"], step, metrics)
        gc.collect()
    planned_rest = sum(engine.at_rest - engine.on_host for engine in plan.engines.values())
    on_host = plan.on_host  # on a CPU it is all the same memory
    return Comparison(planned_rest + on_host, live.now, plan.at_update + on_host, live.peak)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=tuple(SIZES), default=tuple(SIZES), help="models")
    parser.add_argument("--rows", type=int, default=16, help="decisions per optimizer step (default 16)")
    parser.add_argument("--micro", type=int, default=16, help="decisions per micro-batch (default 16)")
    parser.add_argument("--only", default="", help="variants whose flags hold this, e.g. zero_stage=3 (default all)")
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
                if flags.only not in name:
                    continue
                amounts = {"rows": flags.rows, "micro": flags.micro}
                result = compare(Path(folder), StrategyConfig(**strategy), ActorConfig(**actor), **amounts)
                sizes = (result.planned_rest, result.measured_rest, result.planned_update, result.measured_update)
                ratios = [f"{ratio:.2f}" for ratio in result.ratios]
                found.append((size, name, *(f"{bytes_ / 2**20:.0f}" for bytes_ in sizes), *ratios))
                if launched_rank() == 0:
                    print(*found[-1], flush=True)
    headers = ("model", "flags", "rest: plan MiB", "measured", "update: plan MiB", "measured", "rest", "update")
    if launched_rank() == 0:
        print(f"{launched_world_size()} rank(s)\n{table(headers, found)}")


if __name__ == "__main__":
    main()
