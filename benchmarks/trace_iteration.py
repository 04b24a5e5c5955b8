"""Files and functions of rlvla that one iteration runs through: PPO, SAC, and an evaluation.

Example:
  python benchmarks/trace_iteration.py --write docs/trace.md

Each command runs on toy_reach in this process, with two environment workers. Recorded are the calls in this process and
its threads during the second iteration of training (the first one also builds things), or during the evaluation.
Environment workers run `rlvla/envs/workers/worker.py`, which is not recorded. Files are in order of their first call.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
import threading
from collections.abc import Callable, Collection, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from cli import collect_demos, eval_vla, train_ppo_vla, train_sac_vla, train_sft_vla

SUITE = ["--task_suite_name", "toy_reach", "--num_envs", "2"]
SHORT = ["--no-val_before_train", "--no-use_tensorboard", "--eval_episodes", "2"]
PPO = ["--num_episodes", "16", "--rollout_batch_size", "8", "--train_batch_size", "8", "--no-check_start"]
SAC = ["--num_episodes", "16", "--rollout_batch_size", "8", "--random_episodes", "4"]
FUNCTIONS = 2  # public functions listed for a file


class Trace:
    """Files of rlvla in the order of their first call, with their functions."""

    def __init__(self) -> None:
        self.files: dict[str, dict[str, None]] = {}

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        """A profile function, see `sys.setprofile`."""
        if event == "call":
            path, name = frame.f_code.co_filename, frame.f_code.co_qualname
            if path.startswith(str(ROOT / "rlvla")) and "<" not in name:
                self.files.setdefault(str(Path(path).relative_to(ROOT)), {}).setdefault(name)

    @contextmanager
    def recorded(self) -> Any:
        """Record the calls inside the block."""
        threading.setprofile(self)
        sys.setprofile(self)
        try:
            yield
        finally:
            sys.setprofile(None)
            threading.setprofile(None)  # type: ignore[arg-type]


def traced_iteration(command: Callable[[Sequence[str]], Any], flags: Sequence[str]) -> Trace:
    """The second iteration of a training run."""
    from rlvla.trainer.trainer import Trainer

    trace, step, iterations = Trace(), Trainer._iterate, 0

    def traced(self: Trainer, *args: Any, **kwargs: Any) -> Any:
        nonlocal iterations
        iterations += 1
        if iterations != 2:
            return step(self, *args, **kwargs)
        with trace.recorded():
            return step(self, *args, **kwargs)

    with mock.patch.object(Trainer, "_iterate", traced):
        command(flags)
    return trace


def traced_evaluation(flags: Sequence[str]) -> Trace:
    """An evaluation, from the parsed flags on."""
    from rlvla.commands import evaluate

    trace, run = Trace(), evaluate.run_eval

    def traced(*args: Any, **kwargs: Any) -> Any:
        with trace.recorded():
            return run(*args, **kwargs)

    with mock.patch.object(evaluate, "run_eval", traced):
        eval_vla.main(flags)
    return trace


def table(trace: Trace, listed: Collection[str] = ()) -> str:
    """A Markdown table: file and its first functions, public ones if there are any; then the files `listed` before."""
    rows = ["| file | called first |", "|---|---|"]
    for path, functions in trace.files.items():
        public = [name for name in functions if not any(part.startswith("_") for part in name.split("."))]
        public = public or list(functions)
        if path not in listed:
            rows.append(f"| `{path}` | {', '.join(f'`{name}`' for name in public[:FUNCTIONS])} |")
    again = [f"`{path}`" for path in trace.files if path in listed]
    return "\n".join(rows + (["", f"And of the files above: {', '.join(again)}."] if again else []))


def main() -> None:
    """Record the three traces and print their tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", metavar="PAGE", type=Path, help="page whose tables are replaced, between its marks")
    page = parser.parse_args().write
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(sys.stderr):
        runs = Path(folder)
        demos = str(runs / "demos.hdf5")
        collect_demos.main([*SUITE, "--cameras", "top", "--num_demos", "8", "--output", demos])
        short = ["--pretrain", "compact", "--max_steps", "2"]
        train_sft_vla.main(["--demos", demos, *short, "--save_path", f"{runs}/sft"])
        policy = f"{runs}/sft/policy"
        traces = {
            "ppo": traced_iteration(
                train_ppo_vla.main,
                ["--pretrain", policy, *SUITE, *SHORT, *PPO, "--save_path", f"{runs}/ppo"],
            ),
            "sac": traced_iteration(train_sac_vla.main, [*SUITE, *SHORT, *SAC, "--save_path", f"{runs}/sac"]),
            "evaluation": traced_evaluation(["--pretrain", policy, "--eval_episodes", "2", "--num_envs", "2"]),
        }
    text, listed = "" if page is None else page.read_text(encoding="utf-8"), set[str]()
    for name, trace in traces.items():
        files = table(trace, listed)
        listed.update(trace.files)
        print(f"{name}: {len(trace.files)} files\n{files}\n")
        marked = re.compile(rf"(<!-- trace {name} -->\n).*?(\n<!-- end -->)", re.DOTALL)
        text = marked.sub(lambda match, files=files: match[1] + files + match[2], text)
    if page is not None:
        page.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
