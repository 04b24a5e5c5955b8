"""A run folder with a policy that was trained and evaluated, without any training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rlvla.checkpoints.policy_folder import PolicyRecord
from rlvla.envs import list_tasks
from rlvla.envs.config import EnvConfig, SplitConfig
from rlvla.envs.splits import LearnedStates
from rlvla.evaluation.protocol import describe_protocol
from rlvla.evaluation.report import PolicyEvaluation
from rlvla.evaluation.results import EpisodeOutcome, EvalResult, summarize

(TASK,) = list_tasks("toy_reach")


def results(successes: int, n: int = 20) -> EvalResult:
    outcomes = [EpisodeOutcome(0, 8000 + i, i < successes, True, 7) for i in range(n)]
    return summarize(outcomes, [TASK], "heldout", greedy=True)


def evaluation(successes: int, policy: str) -> dict[str, Any]:
    """The content of eval.json."""
    protocol = describe_protocol([TASK], SplitConfig(), 20, 3, None)
    versions = {"rlvla": "9.8.7", "torch": "2.13.0"}
    seen = "trained on initial states 0..7999 of reach"
    found = PolicyEvaluation(policy, {}, {"greedy": protocol}, [results(successes)], {}, versions, seen)
    return found.as_dict()


def make_run(run: Path) -> Path:
    """Write the run; returns its policy folder, which has not been evaluated by itself."""
    policy = run / "policy"
    policy.mkdir(parents=True)
    (policy / "config.json").write_text(json.dumps({"model_type": "compact", "_name_or_path": str(run / "start")}))
    (policy / "model.safetensors").write_bytes(b"\2\0\0\0\0\0\0\0{}" + bytes(3000))
    learned = (LearnedStates("toy_reach", 0, 0, 8000), LearnedStates("toy_reach", 0, 32, 7995))
    PolicyRecord(EnvConfig("toy_reach", task_ids=(0,), image_size=64, use_proprio=True), learned).write(policy)
    (run / "config.yaml").write_text(
        "# rlvla 9.8.7, commit 0123abc\n"
        f"# python /home/me/cli/train_ppo_vla.py --save_path={run} --vlm_url http://10.0.0.7:8000/v1 --seed 0\n"
    )
    (run / "totals.json").write_text('{"episodes": 2048, "env_steps": 20480, "seconds": 60}')
    (run / "evaluations.json").write_text(json.dumps([{"iteration": 8, **results(15).as_dict()}]))
    return policy
