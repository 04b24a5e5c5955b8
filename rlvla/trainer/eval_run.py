"""From the flags of `cli/eval_vla.py` to a table and a JSON file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rlvla.envs.config import EnvConfig, SplitConfig
from rlvla.models.actor import Actor
from rlvla.models.vla.checkpoint import EVALUATION_FILE
from rlvla.rollout import RolloutEngine
from rlvla.trainer.evaluation import EvalResult, evaluate
from rlvla.trainer.setup import PolicyConfig, check_setting, start_workers
from rlvla.utils.arguments import range_problems
from rlvla.utils.errors import ConfigError
from rlvla.utils.logging import quiet_libraries
from rlvla.utils.runs import write_json
from rlvla.utils.strategy import DeepspeedStrategy, StrategyConfig


def run_eval(policy: PolicyConfig, env: EnvConfig, split: SplitConfig, config: Any) -> list[EvalResult]:
    """Evaluate greedily and, if asked for, sampled; prints the tables and writes the JSON file."""
    problems = [p for part in (policy, env, split, config) for p in range_problems(part)]
    setting, more = check_setting(policy, env, split, config.eval_episodes)
    if problems or more or setting is None:
        raise ConfigError(problems + more)
    quiet_libraries()
    results = []
    with start_workers(config.num_envs, setting.env, setting.tasks[0]) as pool:
        strategy = DeepspeedStrategy(StrategyConfig(), seed=config.seed)
        actor = Actor.from_pretrained(policy.pretrain, unnorm_key=setting.unnorm_key, **setting.overrides).eval()
        actor.to(strategy.device)
        rollout = RolloutEngine(pool, setting.env.env_kwargs(), {"success": 1.0})
        for greedy in (True, False) if config.sampled else (True,):
            result = evaluate(
                rollout,
                actor,
                setting.tasks,
                strategy,
                episodes_per_task=config.eval_episodes,
                split=split,
                seed=config.seed,
                greedy=greedy,
                temperature=config.temperature,
                description="evaluate greedy" if greedy else "evaluate sampled",
            )
            results.append(result)
            if strategy.is_main:
                print(result.as_table())
        if strategy.is_main:
            path = Path(config.output) if config.output else Path(policy.pretrain) / EVALUATION_FILE
            write_json(path, describe(policy, setting.env, config, results))
            print(f"figures: {path}")
    return results


def describe(policy: PolicyConfig, env: EnvConfig, config: Any, results: list[EvalResult]) -> dict[str, Any]:
    """The content of the JSON file: what was evaluated, how, and the figures."""
    return {
        "policy": policy.pretrain,
        "environment": env.as_dict(),
        "seed": config.seed,
        "temperature": config.temperature,
        "results": [result.as_dict() for result in results],
    }
