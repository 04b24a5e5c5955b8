"""One optimiser step of actor and critic on fixed rows, in many settings; run alone or on two ranks under a launcher.

deepspeed --num_accelerators 2 tests/support/step_cases.py POLICY OUT
"""

from __future__ import annotations

import copy
import itertools
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from rlvla.algorithms.choices import AGGREGATION_MODES
from rlvla.experience import Experience
from rlvla.models.actor import Actor
from rlvla.models.value_models import Critic
from rlvla.trainer.algorithm_config import AlgorithmConfig
from rlvla.trainer.config import BatchConfig
from rlvla.trainer.metrics import Metrics
from rlvla.trainer.replay import EPISODES_PER_RANK
from rlvla.trainer.updater import Updater
from rlvla.utils.deepspeed.config import StrategyConfig
from rlvla.utils.deepspeed.engine import OptimConfig
from rlvla.utils.deepspeed.strategy import DeepspeedStrategy

A, D, T = 4, 2, 8
OPTIM = OptimConfig(0.1, (0.9, 0.999), 0.0, "constant", 0.0, 10)
ROWS, ON_FIRST_RANK = 10, 8  # rows of six episodes; rank 0 holds five of these, rank 1 one
EPISODES = torch.tensor([0, 0, 1, 2, 2, 3, 4, 4, 5, 5])
KL_COEF = 0.2

# name -> (ZeRO stage, rows per micro-batch, algorithm, batch)
Setting = tuple[int, int, dict, dict]
ONE_MICRO_BATCH = 100


def settings() -> dict[str, Setting]:
    """Every mode with each stage and accumulation; then levels, losses and ways to share out the rows."""
    found: dict[str, Setting] = {}
    # Rank 0 has 8 rows, so 1 or 4 micro-batches; rank 1 has 2, and blank ones where these are used up.
    for mode, (stage, steps, size) in itertools.product(AGGREGATION_MODES, ((0, 1, 8), (2, 4, 2))):
        found[f"{mode}, ZeRO {stage}, {steps} micro-batches"] = (stage, size, {"loss_agg_mode": mode}, {})
    for level in ("action", "chunk"):
        found[f"{level} level"] = (0, 2, {"log_prob_level": level, "loss_agg_mode": "traj-mean-token-mean"}, {})
    for loss in ("gspo", "sapo", "geo_mean", "cispo"):
        found[loss] = (2, 2, {"policy_loss": loss, "loss_agg_mode": "traj-mean-token-mean"}, {})
    # The choice of clip_cov is not left to chance: all of a band.
    for loss, amounts in (("kl_cov", {"cov_ratio": 0.1}), ("clip_cov", {"cov_ratio": 1.0, "cov_low": 0.1})):
        found[loss] = (2, 2, {"policy_loss": loss, **amounts}, {"balance_ranks": "rows"})
    for balance in ("tokens", "rows"):
        found[f"balanced by {balance}"] = (0, 2, {"loss_agg_mode": "traj-mean-token-mean"}, {"balance_ranks": balance})
    found["horizon"] = (0, 3, {"loss_agg_mode": "seq-mean-token-sum-norm", "loss_horizon": 30.0}, {})
    return found


def rows_of(actor: Actor) -> Experience:
    """Ragged rows, one of them empty, of episodes of unequal length; the same in every process."""
    generator = torch.Generator().manual_seed(0)
    executed = torch.tensor([4, 2, 1, 4, 3, 0, 4, 4, 4, 1])
    mask = torch.arange(T)[None] // D < executed[:, None]
    old = -2.0 - torch.rand(ROWS, T, generator=generator)
    return Experience(
        images=torch.randint(0, 256, (ROWS, 1, 64, 64, 3), dtype=torch.uint8, generator=generator),
        proprio=torch.rand(ROWS, 2, generator=generator),
        instructions=["reach the red disc"] * 3 + ["reach the yellow disc"] * 7,
        episode_index=EPISODES,
        trace={"tokens": torch.randint(0, 256, (ROWS, T), generator=generator)},
        action_mask=mask,
        policy_mask=mask & (torch.arange(T) != 2),
        value_mask=mask & (torch.arange(T) % D == 0),
        advantages=torch.randn(ROWS, 1, generator=generator).expand(-1, T).contiguous(),
        returns=torch.randn(ROWS, T, generator=generator),
        values=torch.randn(ROWS, T, generator=generator),
        old_log_probs=old,
        rollout_log_probs=old,
        ref_log_probs=old - 0.1,
    )


def share(rows: Experience, strategy: DeepspeedStrategy) -> Experience:
    """The rows of this rank, with episodes numbered as `ExperienceMaker` does."""
    if strategy.world_size == 1:
        return rows
    own = torch.arange(ON_FIRST_RANK) if strategy.rank == 0 else torch.arange(ON_FIRST_RANK, ROWS)
    part = rows.index(own)
    return part.with_fields(episode_index=part.episode_index + strategy.rank * EPISODES_PER_RANK)


def one_step(
    actor: Actor, critic: Critic, setting: Setting, strategy: DeepspeedStrategy
) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """Parameters of actor and critic after one step of plain gradient descent, and the metrics."""
    stage, micro, algorithm, batch = setting
    strategy.config = StrategyConfig(zero_stage=stage, max_norm=1e6)
    engines = {"actor": strategy.prepare(copy.deepcopy(actor), OPTIM)}
    engines["critic"] = strategy.prepare(copy.deepcopy(critic), OPTIM)
    config = AlgorithmConfig.from_flags(entropy_loss_coef=0.1, use_kl_loss=True, init_kl_coef=KL_COEF, **algorithm)
    updater = Updater(strategy, BatchConfig(micro_train_batch_size=micro, **batch), config, actor)
    metrics = Metrics()
    step = updater.spread(share(rows_of(actor), strategy), Metrics())  # balance: not of the step
    updater.policy_step(engines["actor"], step, KL_COEF, metrics, first_of_iteration=False)
    updater.value_step(engines["critic"], step, metrics)
    after = {f"{name}.{k}": v.clone() for name, e in engines.items() for k, v in e.module.state_dict().items()}
    return after, metrics.reduce(strategy)


def models(policy: str | Path) -> tuple[Actor, Critic]:
    """Actor, and a critic whose head is not zero."""
    torch.manual_seed(0)
    critic = Critic.from_pretrained(policy)
    torch.nn.init.normal_(critic.head.weight, std=0.3)
    return Actor.from_pretrained(policy), critic


def plain_gradient_descent() -> None:
    """Adam divides by the gradient's size and would turn rounding noise of tiny gradients into whole steps."""
    torch.optim.AdamW = lambda parameters, lr, betas, weight_decay: torch.optim.SGD(parameters, lr=lr)


def main(policy: str, out: str) -> None:
    torch.set_num_threads(1)
    strategy = DeepspeedStrategy(StrategyConfig())  # imports DeepSpeed, which derives from the real AdamW
    plain_gradient_descent()
    actor, critic = models(policy)
    results = {name: one_step(actor, critic, setting, strategy) for name, setting in settings().items()}
    torch.save(results, Path(out) / f"rank{strategy.rank}.pt")
    strategy.barrier()


if __name__ == "__main__":
    main(*[argument for argument in sys.argv[1:] if not argument.startswith("--local_rank")])
