"""Ctrl-C at random moments of every command: one line, exit status 130, no traceback, no process left.

    python benchmarks/interrupt_commands.py --tries 5

Each command is first run to its end on toy_reach, to know how long it takes, and then interrupted `--tries` times:
SIGINT goes to every process of its session, as from a terminal. What the interpreter prints before it runs our code
does not count. The exit status is 1 if there was a violation.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
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

from tests.support.processes import running

TINY = "--tiny_vision_dim 16 --tiny_llm_dim 32 --tiny_llm_layers 1"
PPO = "--no-check_start --num_episodes 32 --rollout_batch_size 8 --train_batch_size 8 --num_envs 2 --max_steps 8"
# In an order in which each finds what it reads below {out}; it writes to {new}.
COMMANDS = {
    "collect_demos": "--task_suite_name toy_reach --use_proprio --keep all --num_demos 60 --output {new}",
    "train_sft_vla": f"--demos {{out}}/collect_demos/demos.hdf5 --max_epochs 2 {TINY} --save_path {{new}}",
    "train_ppo_vla": f"--pretrain {{out}}/train_sft_vla/policy {PPO} --save_path {{new}}",
    "eval_vla": "--pretrain {out}/train_sft_vla/policy --eval_episodes 20 --num_videos 1 --output {new}/eval.json",
    "inspect_vla": "--pretrain {out}/train_sft_vla/policy",
    "score_episodes": "--demos {out}/collect_demos/demos.hdf5 --output {new}",
    "convert_demos": "--demos {out}/collect_demos/demos.hdf5 --format lerobot-v3.0 --output {new}",
    "check_demos": "{out}/collect_demos --output {new}",
    "check_env": "toy_reach --output {new}.png",
    "draw_reward_machine": "--machine stack --output {new}.png",
}
ENDED = (0, 128 + signal.SIGINT, -signal.SIGINT)  # it was done, or interrupted, perhaps before Python ran our code
NOT_STARTED = "init_import_site"  # in the message of an interpreter that was interrupted at its own start
TRACEBACK = "Traceback (most recent call last)"
NOISE = (TRACEBACK, "Exception ignored", "terminate called", "Fatal Python error", "core dumped")


def start(name: str, out: Path, folder: str) -> subprocess.Popen[str]:
    """A command in a session of its own."""
    words = COMMANDS[name].format(out=out, new=out / folder).split()
    return subprocess.Popen(
        [sys.executable, str(ROOT / "cli" / f"{name}.py"), *words],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def interrupt(name: str, out: Path, after: float) -> list[str]:
    """What is wrong when the command is interrupted after that many seconds."""
    process = start(name, out, "interrupted")
    time.sleep(after)
    problems = []
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGINT)
    try:
        text, _ = process.communicate(timeout=90)
    except subprocess.TimeoutExpired:
        problems.append("it did not end within 90 s")
        text = ""
    deadline = time.monotonic() + 30
    while (left := running("", process.pid)) and time.monotonic() < deadline:
        time.sleep(0.1)
    if left:
        problems.append(f"{len(left)} processes are left")
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        process.communicate()
    if NOT_STARTED in text:
        return problems
    if process.returncode not in ENDED:
        problems.append(f"exit status {process.returncode}")
    ours = re.search(rf"{re.escape(str(ROOT))}/(cli|rlvla)/", text)
    problems += [f"'{noise}'" for noise in NOISE if noise in text and (ours or noise != TRACEBACK)]
    if text.count(": interrupted;") + text.count("SIGINT: stopping") > 1:
        problems.append("more than one line about it")
    for path in out.glob("interrupted*"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    return [f"{name} after {after:.2f} s: {problem}\n{text}" for problem in problems]


def main() -> None:
    """Interrupt all commands; see the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tries", type=int, default=5, help="per command")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("--commands", nargs="*", default=list(COMMANDS), choices=COMMANDS, help="which to interrupt")
    args = parser.parse_args()
    # A shell ignores SIGINT in what it starts in the background, and children inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    moments, tries, violations = random.Random(args.seed), {}, []
    with tempfile.TemporaryDirectory() as folder:
        for name in COMMANDS:
            begun = time.monotonic()
            process = start(name, Path(folder), name)
            text, _ = process.communicate()
            if process.returncode:
                raise SystemExit(f"{name} failed:\n{text}")
            seconds = time.monotonic() - begun
            if name not in args.commands:
                continue
            tries[name] = args.tries
            for _ in range(args.tries):
                violations += interrupt(name, Path(folder), moments.uniform(0.0, 1.05 * seconds))
            print(
                f"{name}: {args.tries} interrupts within {seconds:.1f} s, {len(violations)} violations so far",
                flush=True,
            )
    print("\n".join(violations))
    print(json.dumps({"tries": tries, "violations": len(violations)}))
    raise SystemExit(bool(violations))


if __name__ == "__main__":
    main()
