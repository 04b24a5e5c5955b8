"""Interrupts `examples/scripts/toy_reach.sh` at random moments and runs it again, until it comes to its end.

    python benchmarks/interrupt_quickstart.py --kills 8

SIGKILL and SIGINT in turn, to every process of the job, in each stage: demonstrations, SFT, PPO, the last evaluation.
Passed means: no attempt failed by itself, no process outlived its job by a minute, and in the end the supervised
policy, the trained policy and all evaluations are, to the bit, those of a run that nobody interrupted.
"""

from __future__ import annotations

import argparse
import filecmp
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rlvla.trainer.checkpoints import list_checkpoints

ROOT = Path(__file__).resolve().parents[1]
NUM_DEMOS = "500"
EPISODES, PER_ITERATION = 1024, 128
PPO = f"--num_episodes {EPISODES} --rollout_batch_size {PER_ITERATION} --eval_episodes 100 --deterministic_rollout"
CONTINUED_AT_THE_END = f"continuing after iteration {EPISODES // PER_ITERATION} of"
# Stage -> what the log says once it has begun.
STAGES = {
    "demonstrations": "demonstrations of",
    "sft": "SFT:",
    "ppo": "iteration 1/",
    "evaluation": f"iteration {EPISODES // PER_ITERATION}/{EPISODES // PER_ITERATION}: ",
}


class Job:
    """The script in a session of its own.

    Args:
        out: its folder.
        log: receives what it prints.
    """

    def __init__(self, out: Path, log: Path):
        environment = os.environ | {"OUT": str(out), "NUM_DEMOS": NUM_DEMOS, "OMP_NUM_THREADS": "1"}
        command = ["bash", str(ROOT / "examples/scripts/toy_reach.sh"), *PPO.split()]
        self.log = log
        with log.open("w") as file:
            self.process = subprocess.Popen(
                command, env=environment, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
            )

    def has_said(self, text: str) -> bool:
        """Whether it is in the log."""
        return text in self.log.read_text(errors="replace")

    def members(self) -> list[int]:
        """Live processes of its session."""
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except (FileNotFoundError, ProcessLookupError):
                continue
            if fields[0] not in "ZX" and int(fields[3]) == self.process.pid:
                found.append(int(entry.name))
        return found

    def send(self, number: int) -> None:
        """The signal, to every process."""
        for pid in self.members():
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                continue

    def gone(self, seconds: float) -> bool:
        """Whether all of it ends within that time; what does not is killed."""
        deadline = time.monotonic() + seconds
        while self.members() and time.monotonic() < deadline:
            self.process.poll()
            time.sleep(0.1)
        left = bool(self.members())
        self.send(signal.SIGKILL)
        self.process.wait()
        return not left


def time_stages(job: Job) -> dict[str, float]:
    """Run it to its end; how long each stage took, in seconds."""
    begun: dict[str, float] = {}
    while job.process.poll() is None:
        for stage, words in STAGES.items():
            if stage not in begun and job.has_said(words):
                begun[stage] = time.monotonic()
        time.sleep(0.05)
    if job.process.returncode:
        raise SystemExit(f"the uninterrupted run failed:\n{job.log.read_text()[-3000:]}")
    ends = [*list(begun.values())[1:], time.monotonic()]
    return {stage: end - start for (stage, start), end in zip(begun.items(), ends)}


def interrupt(job: Job, stage: str, delay: float, number: int) -> str | None:
    """Send the signal so long after the stage has begun; what went wrong, or None."""
    while job.process.poll() is None and not begun(job, stage):
        time.sleep(0.05)
    time.sleep(delay)
    if job.process.poll() is not None:  # it came to its end before, which is no failure
        return None if job.process.returncode == 0 else f"failed by itself in {stage}:\n{job.log.read_text()[-3000:]}"
    job.send(number)
    return None if job.gone(60) else f"processes of the job outlived {signal.Signals(number).name} in {stage}"


def begun(job: Job, stage: str) -> bool:
    """A continued run begins with a later iteration than the first."""
    if stage == "ppo":
        return job.has_said("update:") or job.has_said(" rollout:")
    return job.has_said(STAGES[stage]) or (stage == "evaluation" and job.has_said(CONTINUED_AT_THE_END))


def differences(ours: Path, theirs: Path) -> list[str]:
    """What is not equal in two finished folders."""
    found = [
        f"{name} differ"
        for name in ("sft/policy/model.safetensors", "ppo/policy/model.safetensors")
        if not filecmp.cmp(ours / name, theirs / name, shallow=False)
    ]
    first, second = (json.loads((folder / "ppo/evaluations.json").read_text()) for folder in (ours, theirs))
    return found + ([] if first == second else [f"evaluations: {first} and {second}"])


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=8, help="signals sent, spread over the stages")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    rng, problems, sent = random.Random(arguments.seed), [], []
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        seconds = time_stages(Job(folder / "whole", folder / "log"))
        print("uninterrupted: " + ", ".join(f"{stage} {took:.0f} s" for stage, took in seconds.items()), flush=True)
        kills = sorted(range(arguments.kills), key=lambda kill: kill % len(STAGES))  # earlier stages first
        for index, kill in enumerate(kills):
            stage, number = list(STAGES)[kill % len(STAGES)], (signal.SIGKILL, signal.SIGINT)[index % 2]
            delay = rng.uniform(0, seconds[stage])
            problem = interrupt(Job(folder / "cut", folder / "log"), stage, delay, number)
            saved = [path.name for path in list_checkpoints(folder / "cut/ppo/checkpoints")]
            sent.append(f"{signal.Signals(number).name} {delay:.1f} s into {stage}; checkpoints {saved}")
            print(sent[-1] + (f": {problem}" if problem else ""), flush=True)
            problems += [problem] if problem else []
        last = Job(folder / "cut", folder / "log")
        if last.process.wait():
            problems.append(f"the last attempt failed:\n{last.log.read_text()[-3000:]}")
        else:
            problems += differences(folder / "cut", folder / "whole")
    for problem in problems:
        print(problem)
    print(f"{len(sent)} interruptions, {len(problems)} violations")
    raise SystemExit(bool(problems))


if __name__ == "__main__":
    main()
