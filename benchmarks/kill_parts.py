"""Kills one process of a training run at a random moment, several times: the run goes on, or ends and can be resumed.

    python benchmarks/kill_parts.py --parts worker ray_worker replica raylet --kills 3

Parts are processes: a worker, a worker or a copy of the policy on Ray, Ray's own raylet and gcs_server, vLLM (with its
interpreter as --rollout_python), the trainer, one of two ranks; with `async_` before the name while episodes are played
ahead. SIGKILL and SIGSTOP in turn. A violation is a traceback, a process that is left, a run that hangs or cannot be
resumed, and, if episodes are not played ahead, a policy that differs from that of an uninterrupted run.
"""

from __future__ import annotations

import argparse
import filecmp
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from rlvla.utils.files import read_metrics
from tests.support.launching import environment, free_port
from tests.support.processes import MARK, running

TRAIN = "cli/train_ppo_vla.py"
ITERATIONS, EPISODES = 6, 8
FLAGS = f"--num_episodes {ITERATIONS * EPISODES} --rollout_batch_size {EPISODES} --train_batch_size 8 --num_envs 2"
FLAGS += " --max_steps 16 --eval_episodes 4 --no-val_before_train --no-use_tensorboard --no-check_start --save_steps 1"
FLAGS += " --deterministic_rollout --env_step_timeout 5 --env_reset_timeout 20 --rank_timeout 20"
FLAGS += " --max_idle_iterations 0"
RAY = "--ray_address local"
# Part -> text in the command line of its process, and flags with which there is one.
PARTS = {
    "worker": ("rlvla.envs.workers.worker", ""),
    "ray_worker": ("ray::RayWorker", f"--env_backend ray {RAY}"),
    "replica": ("ray::Replica", f"--rollout_backend actors --rollout_actors 2 {RAY}"),
    "raylet": ("raylet/raylet", f"--env_backend ray {RAY}"),
    "gcs": ("gcs_server", f"--env_backend ray {RAY}"),
    "vllm": ("vllm/engine.py", "--rollout_backend vllm"),
    "trainer": (TRAIN, ""),
    "rank": ("--local_rank=1", ""),
}
AHEAD = "async_"
HANGS_S = 900.0  # a frozen vLLM is given up after 600 s


class Run:
    """A run in a session of its own.

    Args:
        folder: receives the run and its log.
        part: key of `PARTS`, perhaps with `AHEAD` before it.
        more: further flags.
    """

    def __init__(self, folder: Path, part: str, *more: str):
        name = part.removeprefix(AHEAD)
        self.pattern, flags = PARTS[name]
        self.log, self._mark = folder / "log", f"{folder}:{os.urandom(4).hex()}"
        words = [*FLAGS.split(), *flags.split(), *more, "--save_path", str(folder / "run")]
        words += ["--async_rollout"] if part.startswith(AHEAD) else []
        launcher = [sys.executable, "-m", "deepspeed.launcher.runner", "-q", "--num_accelerators", "2"]
        program = [sys.executable] if name != "rank" else [*launcher, "--master_port", free_port()]
        folder.mkdir(exist_ok=True)
        with self.log.open("a") as file:
            self.process = subprocess.Popen(
                [*program, TRAIN, *words],
                cwd=ROOT,
                env=environment() | {MARK: self._mark, "RAY_DEDUP_LOGS": "0"},
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def text(self) -> str:
        """The log."""
        return self.log.read_text(errors="replace")

    def targets(self) -> list[int]:
        """Processes of the part, without those that only name it, as a launcher does."""
        found = running(self.pattern, self._mark)
        return sorted(pid for pid in found if "launcher" not in Path(f"/proc/{pid}/cmdline").read_text())

    def members(self) -> set[int]:
        """All live processes, without Ray's two helpers that notice the end after a minute."""
        return {pid for pid in running("", self._mark) if "gent" not in Path(f"/proc/{pid}/cmdline").read_text()}

    def wait(self) -> list[str]:
        """Wait for the end; what is wrong with it."""
        problems = []
        try:
            self.process.wait(HANGS_S)
        except subprocess.TimeoutExpired:
            problems.append("it hangs")
        deadline = time.monotonic() + 60
        while not problems and self.members() and time.monotonic() < deadline:
            time.sleep(0.1)
        if left := self.members():
            problems.append(f"{len(left)} processes are left")
        for pid in running("", self._mark):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()
        return problems + (["a traceback"] if "Traceback (most" in self.text() else [])


def try_once(
    part: str, whole: Path, folder: Path, *, more: list[str], number: int, wait_s: float
) -> tuple[str, list[str]]:
    """Send a signal to a process of the part; (what happened, what is wrong)."""
    run = Run(folder, part, *more)
    while "iteration 1/" not in run.text() and run.process.poll() is None:
        time.sleep(0.05)
    time.sleep(wait_s)
    targets = run.targets()
    if run.process.poll() is not None or not targets:
        return "over before the signal", run.wait()
    target = random.choice(targets)
    with suppress(ProcessLookupError):
        os.kill(target, number)
    if number == signal.SIGSTOP and part.endswith("trainer"):  # nobody waits for it: its user kills it
        time.sleep(2)
        os.kill(target, signal.SIGKILL)
    problems = run.wait()
    status = run.process.returncode
    happened = f"status {status} after iteration {len(iterations(folder))}"
    if status:
        again = Run(folder, part, *more, "--load_checkpoint")
        problems += [f"{problem}, resumed" for problem in again.wait() if problem not in problems]
        if again.process.returncode:
            problems.append(f"not resumed: status {again.process.returncode}")
    if iterations(folder) != list(range(1, ITERATIONS + 1)):
        problems.append(f"iterations {iterations(folder)}")
    name = "run/policy/model.safetensors"
    if not problems and not part.startswith(AHEAD) and not filecmp.cmp(folder / name, whole / name, shallow=False):
        problems.append("another policy than that of an uninterrupted run")
    return happened, problems


def iterations(folder: Path) -> list[int]:
    """The iterations of the metrics, each once."""
    with suppress(OSError):
        return [int(r["step"]) for r in read_metrics(folder / "run") if "rollout/env_steps" in r]
    return []


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pretrain", required=True, help="a policy for toy_reach; for vllm one that decodes tokens")
    parser.add_argument("--parts", nargs="+", default=["worker", "trainer"], help=f"of {', '.join(PARTS)}")
    parser.add_argument("--kills", type=int, default=3, help="per part")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rollout_python", default=None)
    args = parser.parse_args()
    random.seed(args.seed)
    tries, violations = 0, 0
    for part in args.parts:
        more = ["--pretrain", args.pretrain]
        more += ["--rollout_python", args.rollout_python] if args.rollout_python and "vllm" in part else []
        with tempfile.TemporaryDirectory() as scratch:
            whole = Run(Path(scratch) / "whole", part, *more)
            while "iteration 1/" not in whole.text() and whole.process.poll() is None:
                time.sleep(0.05)
            begun = time.monotonic()
            while f"iteration {ITERATIONS}/" not in whole.text() and whole.process.poll() is None:
                time.sleep(0.05)
            seconds = time.monotonic() - begun
            if whole.wait() or whole.process.returncode:
                raise SystemExit(f"{part}: the uninterrupted run failed:\n{whole.text()[-3000:]}")
            for index in range(args.kills):
                number = (signal.SIGKILL, signal.SIGSTOP)[index % 2]
                folder = Path(scratch) / str(index)
                wait_s = random.uniform(0, 0.9 * seconds)
                whole_folder = Path(scratch) / "whole"
                happened, problems = try_once(part, whole_folder, folder, more=more, number=number, wait_s=wait_s)
                sent = f"{part}, {signal.Signals(number).name} after {wait_s:.1f} s"
                print(f"{sent}: {happened} {problems or ''}", flush=True)
                if problems:
                    print((folder / "log").read_text(errors="replace")[-3000:], flush=True)
                tries, violations = tries + 1, violations + bool(problems)
                shutil.rmtree(folder)
    print(f"{tries} tries, {violations} violations")
    raise SystemExit(bool(violations))


if __name__ == "__main__":
    main()
