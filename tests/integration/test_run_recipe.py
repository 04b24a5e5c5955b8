"""Recipes as processes: stages run once, survive SIGKILL and Ctrl-C, and what killed attempts started ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.support.processes import running, wait_for

ROOT = Path(__file__).resolve().parents[2]
# Stages whose command is a small program: it notes that it started, waits for a file, writes its output.
DRIVER = """
import sys
from pathlib import Path
from types import SimpleNamespace
sys.path.insert(0, {root!r})
sys.modules["rlvla.recipes.report"] = SimpleNamespace(conclude=lambda stages, state: "the report")
from rlvla.recipes import runner
from rlvla.recipes.recipe import Stage
from rlvla.utils.cli.command import command
from rlvla.utils.errors import ConfigError
@command(after_interrupt="the same command continues")
def main(argv):
    folder = Path(argv[0])
    first = argv[1] if len(argv) > 1 else None
    outputs = {{"demos": "demos", "sft": "sft", "rl": "ppo"}}
    stages = [Stage(name, {{"seed": 0}}, (str(folder), output), folder / output) for name, output in outputs.items()]
    try:
        runner.run_recipe(stages, folder, lambda name: [{program!r}], first)
    except ConfigError as error:
        sys.exit(str(error))
main(sys.argv[1:])
"""
PROGRAM = """
import os, sys, time
from pathlib import Path
folder, output = Path(sys.argv[1]), Path(sys.argv[1]) / sys.argv[2]
resumed = output.exists()
output.mkdir(exist_ok=True)
with (folder / "log").open("a") as log:
    log.write(f"{output.name}{' resumed' if resumed else ''}\\n")
deadline = time.monotonic() + 600
while not (folder / f"may_{output.name}").exists():
    time.sleep(0.02)
    assert time.monotonic() < deadline
if (folder / f"fail_{output.name}").exists():
    sys.exit(3)
"""


class Recipe:
    """Runs of the driver in one folder, each in a session of its own."""

    def __init__(self, scratch: Path):
        self.folder = scratch / "run"
        self.folder.mkdir()
        self._started: list[subprocess.Popen] = []
        self._driver, program = scratch / "driver.py", scratch / "stage_program.py"
        program.write_text(PROGRAM)
        self._driver.write_text(DRIVER.format(root=str(ROOT), program=str(program)))

    def allow(self, *names: str) -> None:
        for name in names:
            (self.folder / f"may_{name}").touch()

    def start(self, *words: str) -> subprocess.Popen:
        command = [sys.executable, str(self._driver), str(self.folder), *words]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        self._started.append(subprocess.Popen(command, **pipes, text=True, start_new_session=True))
        return self._started[-1]

    def kill(self) -> None:
        """End whatever is left of all runs."""
        for process in self._started:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()

    def run(self, *words: str) -> tuple[int, str]:
        process = self.start(*words)
        text, _ = process.communicate(timeout=300)
        return process.returncode, text

    @property
    def log(self) -> list[str]:
        path = self.folder / "log"
        return path.read_text().splitlines() if path.exists() else []

    def status(self) -> dict[str, str]:
        return self._of_records("status")

    def cpu_seconds(self) -> dict[str, float]:
        return self._of_records("cpu_seconds")

    def _of_records(self, name: str) -> dict:
        content = json.loads((self.folder / "state.json").read_text())
        return {stage: record[name] for stage, record in content["stages"].items()}


@pytest.fixture
def recipe(tmp_path: Path) -> Iterator[Recipe]:
    recipe = Recipe(tmp_path)
    yield recipe
    recipe.kill()


@pytest.mark.parametrize("whole", [True, False], ids=["all processes", "the recipe alone"])
def test_a_killed_run_continues(recipe: Recipe, whole: bool) -> None:
    recipe.allow("demos")
    first = recipe.start()
    assert wait_for(lambda: recipe.log == ["demos", "sft"], 300)
    (os.killpg if whole else os.kill)(first.pid, signal.SIGKILL)
    first.wait()
    assert wait_for(lambda: not running("stage_program", first.pid), 300), "what it had started goes on"
    assert recipe.status() == {"demos": "done", "sft": "running"}
    recipe.allow("sft", "ppo")
    status, text = recipe.run()
    assert status == 0 and text.endswith("the report\n"), text
    assert "== demos: done before" in text
    assert recipe.log == ["demos", "sft", "sft", "ppo"], "the remains of sft were removed, demos not repeated"
    assert recipe.status() == {"demos": "done", "sft": "done", "ppo": "done"}
    status, text = recipe.run()
    assert status == 0 and "is complete" in text and len(recipe.log) == 4


def test_supervised_training_killed_after_its_last_file_is_done(recipe: Recipe) -> None:
    recipe.allow("demos")
    first = recipe.start()
    assert wait_for(lambda: recipe.log == ["demos", "sft"], 300)
    (recipe.folder / "sft" / "verdict.json").touch()
    os.killpg(first.pid, signal.SIGKILL)
    recipe.allow("ppo")
    status, text = recipe.run()
    assert status == 0 and "== sft: done before" in text, text
    assert recipe.log == ["demos", "sft", "ppo"]


@pytest.mark.parametrize("whole", [True, False], ids=["from the terminal", "to the recipe alone"])
def test_an_interrupt_ends_the_command_and_names_the_next_one(recipe: Recipe, whole: bool) -> None:
    recipe.allow("demos", "sft")
    first = recipe.start()
    assert wait_for(lambda: recipe.log == ["demos", "sft", "ppo"], 300)
    (os.killpg if whole else os.kill)(first.pid, signal.SIGINT)
    text, _ = first.communicate(timeout=300)
    assert first.returncode == 130
    assert f"continue with: python {first.args[1]} {recipe.folder}\n" in text
    assert not running("stage_program", first.pid)
    recipe.allow("ppo")
    assert recipe.run()[0] == 0
    assert recipe.log[3:] == ["ppo resumed"], "reinforcement learning goes on from what it has"


def test_a_failed_stage_ends_the_recipe_with_its_status(recipe: Recipe) -> None:
    recipe.allow("demos", "sft")
    (recipe.folder / "fail_sft").touch()
    status, text = recipe.run()
    assert status == 3 and "== sft: not finished (exit status 3" in text and "continue with: python" in text
    assert recipe.log == ["demos", "sft"]


def test_the_processor_time_of_a_stage_is_that_of_its_attempts(recipe: Recipe) -> None:
    recipe.allow("demos", "sft", "ppo")
    (recipe.folder / "fail_sft").touch()
    recipe.run()
    once = recipe.cpu_seconds()
    assert set(once) == {"demos", "sft"} and all(0 < used < 10 for used in once.values())
    (recipe.folder / "fail_sft").unlink()
    recipe.run()
    twice = recipe.cpu_seconds()
    assert twice["demos"] == once["demos"] and twice["sft"] > once["sft"] and twice["ppo"] > 0


def test_a_stage_is_repeated_with_all_later_ones(recipe: Recipe) -> None:
    recipe.allow("demos", "sft", "ppo")
    assert recipe.run()[0] == 0
    (recipe.folder / "may_ppo").unlink()
    again = recipe.start("sft")
    assert wait_for(lambda: recipe.log[3:] == ["sft", "ppo"], 300)
    again.kill()
    again.wait()
    assert (recipe.folder / "superseded_ppo").is_dir()
    recipe.allow("ppo")
    assert recipe.run()[0] == 0
    assert recipe.log[3:] == ["sft", "ppo", "ppo resumed"], "repeated once"


SMALL = """\
stages:
  demos: {task_suite_name: toy_reach, image_size: 16, num_demos: 8, num_envs: 1, keep: all, minutes: 0.1}
  sft: {pretrain: tiny, action_chunk_len: 4, tiny_vision_dim: 16, tiny_llm_dim: 32, tiny_llm_layers: 1, max_epochs: 1,
        train_batch_size: 16, processes: 1}
  rl: {save_path: $output/ppo, num_episodes: 16, rollout_batch_size: 4, n_samples_per_prompt: 2, train_batch_size: 8,
       advantage_estimator: grpo, max_steps: 8, save_steps: 1, eval_episodes: 4, num_envs: 1, check_start: false}
"""


@pytest.mark.nightly
@pytest.mark.slow
def test_a_recipe_of_toy_reach_from_nothing_to_its_report(tmp_path: Path) -> None:
    """Killed while it trains, run again, and then a change is noticed."""
    (tmp_path / "small.yaml").write_text(SMALL)
    command = [sys.executable, str(ROOT / "cli/run_recipe.py"), "small.yaml", "--output", "run"]
    with subprocess.Popen(command, cwd=tmp_path, start_new_session=True) as first:
        assert wait_for(lambda: any((tmp_path / "run/ppo/checkpoints").glob("iteration_*")), 300)
        os.killpg(first.pid, signal.SIGKILL)
    again = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert again.returncode == 0, again.stdout + again.stderr
    assert "== sft: done before" in again.stdout and "continuing after iteration" in again.stdout
    report = json.loads((tmp_path / "run/report.json").read_text())
    assert set(report) == {"sft", "rl", "difference", "seconds", "env_steps", "episodes", "seed", "protocol"}
    assert set(report["seconds"]) == {"demos", "sft", "rl", "total"} and report["episodes"] == 16
    assert report["rl"]["n"] == report["difference"]["n"] == 4
    assert "<h2>Stages</h2>" in (tmp_path / "run/report.html").read_text()
    changed = subprocess.run([*command, "--set", "sft.seed=1"], cwd=tmp_path, capture_output=True, text=True)
    assert changed.returncode == 2 and "--from sft" in changed.stderr
