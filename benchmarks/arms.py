"""Arms of a comparison that start from one supervised policy: their commands, and the table of paired differences."""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rlvla.evaluation.comparison import compare_over_runs
from rlvla.evaluation.report import PolicyEvaluation
from rlvla.evaluation.results import EvalResult
from rlvla.utils.files import write_json
from rlvla.utils.terminal import table

ROOT = Path(__file__).resolve().parents[1]
_SFT = "--train_batch_size 64 --lr_warmup_ratio 0.03 --no-use_tensorboard"
Arm = tuple[str, int, Path]  # name, number of episodes, policy
Results = dict[tuple[str, int], list[EvalResult]]  # name and number of episodes -> evaluation of each seed


@dataclass(frozen=True)
class Task:
    """A task and its start, a supervised policy that succeeds in 30 to 60 % of its episodes on held-out states.

    Attributes:
        demos: flags of the expert's demonstrations.
        start: flags of the start's training.
        steps: optimizer steps of continued training.
        ppo: flags of PPO.
    """

    demos: str
    start: str
    steps: int
    ppo: str

    @property
    def num_demos(self) -> int:
        """Demonstrations of the start."""
        return int(shlex.split(self.demos)[-1])


_PPO = (
    "--advantage_estimator gae --gamma 0.99 --lambd 0.95 --rollout_batch_size 25 --n_samples_per_prompt 1 "
    "--train_batch_size 25 --micro_train_batch_size 96 --max_epochs 2 --eps_clip_low_high 0.2 0.28 "
    "--actor_learning_rate 4e-4 --critic_learning_rate 1e-3 --num_envs 1 "
    "--no-val_before_train --no-use_tensorboard"
)
START = "--pretrain compact --compact_head gaussian --action_std_init 0.3 --sft_loss nll --learning_rate 2e-3"
TASKS = {
    "toy_push": Task(
        demos="--task_suite_name toy_push --task_ids 0 --image_size 64 --use_proprio --num_envs 1 --num_demos 40",
        start=f"{START} --action_chunk_len 5 --max_epochs 1000 --max_steps 600",
        steps=600,
        ppo=f"{_PPO} --task_suite_name toy_push --task_ids 0",
    ),
    "lift": Task(
        demos="--task_suite_name robosuite --task_ids 0 --control_freq 10 --max_steps 25 --cameras wrist "
        "--image_size 64 --use_proprio --num_envs 1 --num_demos 12",
        start=f"{START} --action_chunk_len 5 --max_epochs 1000 --max_steps 200",
        steps=600,
        ppo=f"{_PPO} --task_suite_name robosuite --task_ids 0",
    ),
}


def command(script: str, output: Path, *words: str | Path) -> None:
    """Run a command of the project unless its output is there, a file in a folder of its own."""
    if output.exists():
        return
    log = output.parent.with_name(f"{output.parent.name}_{script}.log")
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as file:
        line = [sys.executable, str(ROOT / "cli" / f"{script}.py"), *map(str, words)]
        code = subprocess.run(line, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT).returncode
    if code:
        raise SystemExit(f"{shlex.join(line)} failed:\n{log.read_text()[-3000:]}")


def result_of(path: Path) -> EvalResult:
    """The result in a file of `cli/eval_vla.py`."""
    (result,) = PolicyEvaluation.read(path).results
    return result


def evaluation(policy: Path, episodes: int, *flags: str) -> EvalResult:
    """Greedy success on held-out states."""
    output = policy.parent / "eval.json"
    command("eval_vla", output, "--pretrain", policy, "--eval_episodes", episodes, "--output", output, *flags)
    return result_of(output)


def collect(folder: Path, flags: str, count: int, seed: int) -> Path:
    """Episodes; `--num_demos` of `flags` is replaced."""
    words = [*shlex.split(flags), "--num_demos", count, "--seed", seed, "--output", folder]
    command("collect_demos", folder / "demos.hdf5", *words)
    return folder


def fine_tune(folder: Path, flags: Sequence[str], demos: Sequence[Path], seed: int) -> Path:
    """Supervised training; the policy's folder."""
    command("train_sft_vla", folder / "policy", "--demos", *demos, *flags, "--seed", seed, "--save_path", folder)
    return folder / "policy"


def start_of(task: Task, folder: Path, seed: int) -> tuple[Path, Path]:
    """Demonstrations, and the policy that all arms start from."""
    demos = collect(folder / "demos", task.demos, task.num_demos, seed)
    return demos, fine_tune(folder / "start", shlex.split(f"{task.start} {_SFT}"), [demos], seed)


def continued(task: Task, start: Path) -> list[str]:
    """Flags of training that continues from the start."""
    flags = f"--max_epochs 1000 --max_steps {task.steps} --learning_rate 1e-3 --sft_loss nll {_SFT}"
    return ["--pretrain", str(start), *shlex.split(flags)]


def ppo(folder: Path, task: Task, start: Path, episodes: int, seed: int) -> Path:
    """PPO from the start; the policy's folder."""
    words = [*shlex.split(task.ppo), "--pretrain", start, "--num_episodes", episodes, "--seed", seed]
    command("train_ppo_vla", folder / "policy", *words, "--save_path", folder)
    return folder / "policy"


def compare(parser: argparse.ArgumentParser, policies: Callable[..., Iterator[Arm]], reference: str) -> None:
    """Evaluate the arms of each seed on held-out states, and report them.

    Args:
        parser: of the benchmark; receives the flags of all of them.
        policies: task, folder, seed and arguments -> arms, the start first.
        reference: arm that the others are compared with, beside the start.
    """
    name = Path(sys.argv[0]).stem
    parser.add_argument("--task", choices=TASKS, default="toy_push")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--eval_episodes", type=int, default=200)
    parser.add_argument("--output", type=Path, default=Path("runs") / name)
    args, results = parser.parse_args(), Results()
    for seed in args.seeds:
        for arm, count, policy in policies(args.task, args.output / f"seed_{seed}", seed, args):
            results.setdefault((arm, count), []).append(evaluation(policy, args.eval_episodes))
            print(f"seed {seed} {arm} {count}: {results[arm, count][-1].success_at_end}", flush=True)
    report(results, args.task, reference, args.output / f"{name}.json")


def report(results: Results, task: str, reference: str, output: Path) -> None:
    """Print and write the success of each arm, and its difference to the start and to the reference arm.

    Differences are paired by initial state, with 95 % intervals over all seeds.
    """
    rows, record = [], []
    for (arm, count), of_seeds in results.items():
        rates = [result.success_at_end.rate for result in of_seeds]
        row = [arm, count, f"{100 * sum(rates) / len(rates):.1f}", " ".join(f"{100 * rate:.1f}" for rate in rates)]
        entry: dict[str, object] = {"arm": arm, "episodes": count, "rates": rates}
        for name, other in (("start", ("start", 0)), (reference, (reference, count))):
            if other not in results or other == (arm, count):
                row.append("")
                continue
            difference = compare_over_runs(list(zip(of_seeds, results[other], strict=True)))
            row.append(difference.in_points())
            fields = {"difference": difference.difference, "low": difference.low, "high": difference.high}
            entry[f"to_{name}"] = fields | {"n": difference.n}
        rows.append(row)
        record.append(entry)
    print(table(("arm", "episodes", "success %", "by run", "to the start [95 %]", f"to {reference} [95 %]"), rows))
    write_json(output, {"task": task, "arms": record})
