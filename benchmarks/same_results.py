"""Whether two checkouts of the repository compute the same thing: short runs of each, compared to the bit.

    python benchmarks/same_results.py --before ../old --after .
    python benchmarks/same_results.py --before ../old --after . --cases ppo lift

Every case runs the commands of each checkout with its own code (`PYTHONPATH`) and the same interpreter, seeds and
flags, with `--deterministic_rollout`. It compares the SHA-256 of all written weights, all metrics except times and
memory, and the outcome of every evaluation episode. Results are cached in `--out` by commit, so an unchanged checkout
is not run again (`--rerun` forces it).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

TOY = "--task_suite_name toy_reach --image_size 32 --use_proprio"
TINY = "--pretrain tiny --tiny_vision_dim 32 --tiny_llm_dim 48"
PPO = (
    "--num_envs 3 --deterministic_rollout --seed 3 --no-use_tensorboard --eval_episodes 24 --num_episodes 96 "
    "--rollout_batch_size {groups} --n_samples_per_prompt {samples} --train_batch_size 8 --max_epochs 2 --save_steps 2"
)
# Steps of a case: (name, command). {run} is the folder of the case, {toy} that of the case "sft".
CASES: dict[str, list[str]] = {
    "sft": [
        f"collect_demos.py {TOY} --num_demos 150 --keep all --offset_bias 0.0 -0.2 --noise_std 0.05 "
        "--output {run}/demos",
        f"train_sft_vla.py --demos {{run}}/demos/demos.hdf5 {TINY} --action_chunk_len 3 --max_epochs 2 "
        "--learning_rate 2e-3 --label_smoothing 0.1 --no-use_tensorboard --save_path {run}/sft",
    ],
    "ppo": [
        "train_ppo_vla.py --pretrain {toy}/sft/policy --save_path {run}/ppo --advantage_estimator gae "
        "--init_kl_coef 0.05 --entropy_loss_coef 0.001 --gamma 0.99 --lambd 0.95 --ema_beta 0.9 --normalize_values "
        "--reward success rm:0.5 " + PPO.format(groups=32, samples=1),
        "eval_vla.py --pretrain {run}/ppo/policy --eval_episodes 20 --sampled --output {run}/eval.json",
    ],
    "grpo": [
        "train_ppo_vla.py --pretrain {toy}/sft/policy --save_path {run}/grpo --advantage_estimator grpo --use_kl_loss "
        "--init_kl_coef 0.01 --kl_estimator full --filter_accuracy --oversample_factor 1.5 --max_group_staleness 1 "
        "--rollout_is tis --log_prob_level action --ptx_demos {toy}/demos/demos.hdf5 --ptx_coef 0.1 "
        + PPO.format(groups=8, samples=4),
    ],
    "lora": [
        "train_ppo_vla.py --pretrain {toy}/sft/policy --save_path {run}/lora --advantage_estimator gae "
        "--share_backbone --lora_rank 4 --init_kl_coef 0.02 --policy_loss gspo --advantage_level chunk "
        + PPO.format(groups=32, samples=1),
        "train_ppo_vla.py --pretrain {toy}/sft/policy --save_path {run}/remax --advantage_estimator remax "
        "--policy_loss kl_cov --use_dynamic_batch --train_max_tokens_per_gpu 600 " + PPO.format(groups=32, samples=1),
    ],
    "rewards": [
        "train_ppo_vla.py --pretrain {toy}/sft/policy --save_path {run}/played --dump_rollouts "
        "--advantage_estimator rloo " + PPO.format(groups=8, samples=4),
        "train_rm_vla.py --demos {run}/played/rollouts/*/*.hdf5 --pretrain {toy}/sft/policy --max_epochs 2 "
        "--no-use_tensorboard --save_path {run}/rm",
        "train_ppo_vla.py --pretrain {toy}/sft/policy --save_path {run}/judged --reward_pretrain {run}/rm/reward_model "
        "--reward success --reward_model_coef 0.3 " + PPO.format(groups=32, samples=1),
        "train_ppo_vla.py --pretrain {toy}/sft/policy --save_path {run}/paid --reward success rm_model:0.5 "
        "--rm_model_path {run}/rm/reward_model --advantage_estimator gdpo " + PPO.format(groups=8, samples=4),
    ],
    "lift": [
        "collect_demos.py --task_suite_name robosuite --task_ids 0 --control_freq 10 --max_steps 25 --cameras wrist "
        "--image_size 64 --use_proprio --num_demos 24 --keep all --offset_bias 0.025 0.0 --noise_std 0.1 "
        "--action_quantum 0.25 --num_envs 2 --output {run}/demos",
        "train_sft_vla.py --demos {run}/demos/demos.hdf5 --pretrain tiny --action_chunk_len 5 --tiny_vision_dim 32 "
        "--tiny_llm_dim 48 --tiny_llm_layers 3 --max_epochs 3 --train_batch_size 64 --learning_rate 2e-3 "
        "--no-use_tensorboard --save_path {run}/sft",
        "train_ppo_vla.py --pretrain {run}/sft/policy --save_path {run}/ppo --freezing_actor_steps 1 --no-check_start "
        "--no-val_before_train --max_idle_iterations 0 --reward success rm:0.5 " + PPO.format(groups=32, samples=1),
    ],
    "nft": [
        "train_sft_vla.py --demos {toy}/demos/demos.hdf5 --pretrain compact --compact_head flow --action_chunk_len 3 "
        "--max_epochs 2 --learning_rate 2e-3 --no-use_tensorboard --save_path {run}/sft",
        "train_ppo_vla.py --pretrain {run}/sft/policy --save_path {run}/nft --algorithm nft --advantage_estimator grpo "
        "--nft_rollout_decay 0.4 --flow_method sde " + PPO.format(groups=8, samples=4),
        "train_ppo_vla.py --pretrain {run}/sft/policy --save_path {run}/dppo --policy_loss dppo --flow_method sde "
        "--flow_noisy_steps all --advantage_estimator grpo " + PPO.format(groups=8, samples=4),
    ],
    "sac": [
        f"train_sac_vla.py {TOY} --read_images --save_path {{run}}/sac --num_envs 3 --deterministic_rollout --seed 3 "
        "--no-use_tensorboard --eval_episodes 24 --num_episodes 64 --rollout_batch_size 16 --random_episodes 8 "
        "--replay_priority td --reward success rm:0.5 --save_steps 2",
    ],
    "recipe": [
        "run_recipe.py recipes/toy_reach.yaml --output {run} --set all.processes=1 demos.num_demos=100 "
        "sft.max_epochs=1 rl.num_episodes=512 rl.deterministic_rollout=true rl.eval_episodes=24",
    ],
}
NOT_COMPARED = ("timing_s/", "perf/", "memory/", "throughput/", "total/seconds", "time", "_per_s")


def commit_of(checkout: Path) -> str:
    """The commit of a checkout; with changes that are not committed, a name that is never taken for another."""
    git = ["git", "-C", str(checkout)]
    commit = subprocess.run(
        [*git, "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=True
    ).stdout
    diff = subprocess.run([*git, "diff", "HEAD"], capture_output=True, check=True).stdout
    return commit.strip() + (f"-{hashlib.sha256(diff).hexdigest()[:8]}" if diff else "")


def run_case(name: str, checkout: Path, folder: Path) -> None:
    """All commands of a case; what they say goes to a file."""
    run = folder / name
    shutil.rmtree(run, ignore_errors=True)
    run.mkdir(parents=True)
    environment = os.environ | {"PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    for command in CASES[name]:
        script, *words = command.format(run=run, toy=folder / "sft").split()
        words = [
            str(path)
            for word in words
            for path in (sorted(run.glob(word[len(str(run)) + 1 :])) if "*" in word else [word])
        ]
        with (run / "log.txt").open("a", encoding="utf-8") as log:
            done = subprocess.run(
                [sys.executable, str(checkout / "cli" / script), *words],
                cwd=checkout,
                env=environment,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        if done.returncode:
            tail = (run / "log.txt").read_text(encoding="utf-8")[-2000:]
            raise SystemExit(f"{checkout}: {name}: {script} ended with {done.returncode}:\n{tail}")
    (run / "done").touch()


def results_of(run: Path) -> dict[str, str]:
    """What a case has computed: names that both checkouts give -> values."""
    found = {}
    for path in sorted(run.rglob("*.safetensors")):
        if "checkpoints" not in path.parts:
            found[str(path.relative_to(run))] = hashlib.sha256(path.read_bytes()).hexdigest()
    for path in sorted(run.rglob("metrics.jsonl")):
        for line in path.read_text(encoding="utf-8").splitlines():
            record = json.loads(line)
            step = record.pop("step")
            for key, value in record.items():
                if not any(part in key for part in NOT_COMPARED):
                    found[f"{path.relative_to(run)}:{step}:{key}"] = repr(value)
    for path in sorted([*run.rglob("eval*.json")]):
        content = json.loads(path.read_text(encoding="utf-8"))
        results = content["results"] if isinstance(content, dict) else content
        found[str(path.relative_to(run))] = json.dumps(
            [_rounded({k: v for k, v in r.items() if "second" not in k}) for r in results]
        )
    return found


def _rounded(value: Any) -> Any:
    """Of an evaluation the counts are exact; the last digits of an interval depend on who computes it."""
    if isinstance(value, dict):
        return {key: _rounded(part) for key, part in value.items()}
    if isinstance(value, list):
        return [_rounded(part) for part in value]
    return round(value, 12) if isinstance(value, float) else value


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--before", type=Path, required=True)
    parser.add_argument("--after", type=Path, default=Path())
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--out", type=Path, default=Path("runs/same_results"))
    parser.add_argument("--rerun", action="store_true")
    args = parser.parse_args()
    cases = list(dict.fromkeys(["sft", *args.cases]))
    folders = []
    for checkout in (args.before.resolve(), args.after.resolve()):
        folder = args.out.resolve() / commit_of(checkout)
        folders.append(folder)
        for name in cases:
            if args.rerun or not (folder / name / "done").exists():
                run_case(name, checkout, folder)
    different = 0
    for name in cases:
        before, after = (results_of(folder / name) for folder in folders)
        missing = sorted(set(before) - set(after))
        changed = [key for key in before if key in after and before[key] != after[key]]
        weights = sum(key.endswith(".safetensors") for key in before)
        verdict = "the same to the bit" if not (missing or changed) else "DIFFERENT"
        print(f"{name}: {len(before)} results, {weights} files of weights: {verdict}")
        for key in [*missing, *changed][:10]:
            print(f"    {key}: {before[key][:80]} -> {after.get(key, 'missing')[:80]}")
        different += bool(missing or changed)
    raise SystemExit(1 if different else 0)


if __name__ == "__main__":
    main()
