"""Interrupts a quickstart at random moments and runs it again, until it completes.

    python benchmarks/interrupt_quickstart.py --script toy_reach --kills 8
    python benchmarks/interrupt_quickstart.py --script quickstart --kills 5

SIGKILL and SIGINT in turn, to every process of the job, in each stage of `examples/scripts/toy_reach.sh` or
`quickstart.sh` (Lift), both shortened. Passed means: no attempt failed by itself, no process outlived its job by a
minute, and in the end both policies, to the bit, and all evaluations are those of an uninterrupted run.
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rlvla.checkpoints.training import list_checkpoints

ROOT = Path(__file__).resolve().parents[1]
LAST = 8  # iteration of toy_reach


@dataclass(frozen=True)
class Script:
    """What is interrupted.

    Attributes:
        num_demos: demonstrations to record.
        flags: for the training.
        stages: stage -> what the log says once it has begun, in a first attempt or in a continued one.
        evaluations: files that hold the figures.
    """

    num_demos: int
    flags: str
    stages: dict[str, tuple[str, ...]]
    evaluations: tuple[str, ...]


SCRIPTS = {
    "toy_reach": Script(
        500,
        f"--num_episodes {128 * LAST} --rollout_batch_size 128 --eval_episodes 100 --deterministic_rollout",
        {
            **{name: (f"== {name} (",) for name in ("demos", "sft", "rl")},
            "evaluation": (f"iteration {LAST}/{LAST}: ", f"continuing after iteration {LAST} of"),
        },
        ("ppo/evaluations.json",),
    ),
    "quickstart": Script(
        40,
        "--num_episodes 384 --eval_episodes 20 --save_steps 1 --no-check_start --deterministic_rollout",
        {name: (f"== {name} (",) for name in ("demos", "sft", "eval_sft", "rl", "eval_rl")},
        ("ppo/evaluations.json", "eval_sft.json", "eval_rl.json"),
    ),
}


class Job:
    """A script in a session of its own.

    Args:
        name: of the script.
        out: its folder.
        log: receives what it prints.
    """

    def __init__(self, name: str, out: Path, log: Path):
        self.script, self.log = SCRIPTS[name], log
        environment = os.environ | {"OUT": str(out), "NUM_DEMOS": str(self.script.num_demos), "OMP_NUM_THREADS": "1"}
        command = ["bash", str(ROOT / "examples/scripts" / f"{name}.sh"), *self.script.flags.split()]
        with log.open("w") as file:
            self.process = subprocess.Popen(
                command, env=environment, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
            )

    def has_begun(self, stage: str) -> bool:
        """Whether the log tells of the stage."""
        text = self.log.read_text(errors="replace")
        return any(words in text for words in self.script.stages[stage])

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
        for stage in job.script.stages:
            if stage not in begun and job.has_begun(stage):
                begun[stage] = time.monotonic()
        time.sleep(0.05)
    if job.process.returncode:
        raise SystemExit(f"the uninterrupted run failed:\n{job.log.read_text()[-3000:]}")
    ends = [*list(begun.values())[1:], time.monotonic()]
    return {stage: end - start for (stage, start), end in zip(begun.items(), ends)}


def interrupt(job: Job, stage: str, delay: float, number: int) -> str | None:
    """Send the signal so long after the stage has begun; what went wrong, or None."""
    while job.process.poll() is None and not job.has_begun(stage):
        time.sleep(0.05)
    time.sleep(delay)
    if job.process.poll() is not None:  # it came to its end before, which is no failure
        return None if job.process.returncode == 0 else f"failed by itself in {stage}:\n{job.log.read_text()[-3000:]}"
    job.send(number)
    return None if job.gone(60) else f"processes of the job outlived {signal.Signals(number).name} in {stage}"


def differences(ours: Path, theirs: Path, script: Script) -> list[str]:
    """What is not equal in two finished folders."""
    found = [
        f"{name} differs"
        for name in ("sft/policy/model.safetensors", "ppo/policy/model.safetensors")
        if not filecmp.cmp(ours / name, theirs / name, shallow=False)
    ]
    for name in script.evaluations:
        first, second = (figures(json.loads((folder / name).read_text())) for folder in (ours, theirs))
        found += [] if first == second else [f"{name}: {first} and {second}"]
    return found


def figures(evaluation: Any) -> Any:
    """What an evaluation found, without the folder that it looked at and the time that it took."""
    if isinstance(evaluation, list):
        return [figures(entry) for entry in evaluation]
    if isinstance(evaluation, dict):
        return {k: figures(v) for k, v in evaluation.items() if k not in ("policy", "pretrain", "seconds", "command")}
    return evaluation


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--script", choices=SCRIPTS, default="toy_reach")
    parser.add_argument("--kills", type=int, default=8, help="signals sent, spread over the stages")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    name, script = arguments.script, SCRIPTS[arguments.script]
    rng, problems, sent, stages = random.Random(arguments.seed), [], [], list(script.stages)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        seconds = time_stages(Job(name, folder / "whole", folder / "log"))
        print("uninterrupted: " + ", ".join(f"{stage} {took:.0f} s" for stage, took in seconds.items()), flush=True)
        kills = sorted(range(arguments.kills), key=lambda kill: kill % len(stages))  # earlier stages first
        for index, kill in enumerate(kills):
            stage, number = stages[kill % len(stages)], (signal.SIGKILL, signal.SIGINT)[index % 2]
            delay = rng.uniform(0, seconds[stage])
            problem = interrupt(Job(name, folder / "cut", folder / "log"), stage, delay, number)
            saved = [path.name for path in list_checkpoints(folder / "cut/ppo/checkpoints")]
            sent.append(f"{signal.Signals(number).name} {delay:.1f} s into {stage}; checkpoints {saved}")
            print(sent[-1] + (f": {problem}" if problem else ""), flush=True)
            problems += [problem] if problem else []
        last = Job(name, folder / "cut", folder / "log")
        if last.process.wait():
            problems.append(f"the last attempt failed:\n{last.log.read_text()[-3000:]}")
        else:
            problems += differences(folder / "cut", folder / "whole", script)
    for problem in problems:
        print(problem)
    print(f"{len(sent)} interruptions, {len(problems)} violations")
    raise SystemExit(bool(problems))


if __name__ == "__main__":
    main()
