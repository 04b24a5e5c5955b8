"""Does a slow judge slow the rollout? Plays toy_reach with and without a VLM server that takes two seconds per answer.

Launch: python benchmarks/vlm_rollout.py
Prints the seconds of the rollout without and with the judge (the fastest of several alternating runs), their ratio, and
the seconds waited for the last answers at its end.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rlvla.envs.workers.pool import EnvPool
from rlvla.rewards import RewardConfig, RewardPlan
from rlvla.rollout import EpisodeRequest, RolloutEngine
from tests.support.judge_server import completion, judge_server
from tests.support.policies import ScriptedPolicy

KWARGS = {"cameras": ("top",), "image_size": 64, "use_proprio": True}


class SlowPolicy(ScriptedPolicy):
    """Random actions; every call takes as long as a model's forward pass would."""

    def __init__(self, seconds: float):
        super().__init__(3, 2)
        self._seconds = seconds

    def actions(self, images, proprio, noise):
        """As drawn."""
        time.sleep(self._seconds)
        return (2 * noise - 1).reshape(-1, 3, 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--episodes", type=int, default=100)
    parser.add_argument("--delay", type=float, default=2.0, help="seconds per answer")
    parser.add_argument("--forward", type=float, default=0.1, help="seconds per call of the policy")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    requests = [EpisodeRequest("toy_reach", 0, i, i, str(i)) for i in range(options.episodes)]
    policy, seconds, tails = SlowPolicy(options.forward), {"without": [], "with": []}, []
    with judge_server() as server, EnvPool(2) as pool:

        def answer(request: dict) -> tuple[int, dict]:
            time.sleep(options.delay)
            return 200, completion('{"success": 0.5}')

        server.answer = answer
        judged = RewardConfig(
            reward=("success", "vlm"), vlm_url=f"{server.url}/v1", vlm_model="m", vlm_scorer="success", vlm_cache_size=0
        )
        for _ in range(options.repeats):
            for name, config in (("without", RewardConfig()), ("with", judged)):
                plan = RewardPlan.from_config(config)
                engine = RolloutEngine(pool, KWARGS, plan)
                engine.run(requests, policy, temperature=1.0)
                seconds[name].append(engine.stats.wall_s)
                if name == "with":
                    tails.append(engine.stats.rewards_s)
                    print(plan.metrics())
                plan.close()
    best = {name: min(values) for name, values in seconds.items()}
    ratio = best["with"] / best["without"]
    print(f"rollout without {best['without']:.2f} s, with {best['with']:.2f} s, ratio {ratio:.3f}")
    print(f"waited for the last answers: {min(tails):.2f} s")


if __name__ == "__main__":
    main()
