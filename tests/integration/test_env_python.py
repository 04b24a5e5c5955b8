"""What the commands start their workers with."""

import sys
from pathlib import Path

import pytest

from cli.collect_demos import main as collect_demos
from rlvla.commands.setup import start_workers
from rlvla.data.reading import read_demonstrations
from rlvla.envs.config import EnvConfig
from rlvla.envs.metaworld.tasks import TASKS


def test_workers_run_with_the_interpreter_of_the_flag(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" -X other_interpreter "$@"\n')
    python.chmod(0o755)
    for asked, expected in ((str(python), True), (None, False)):
        env = EnvConfig(task_suite_name="toy_reach", env_python=asked)
        with start_workers(1, env, env.tasks()) as pool:
            command = Path(f"/proc/{pool._pool.pid(0)}/cmdline").read_bytes()
        assert (b"other_interpreter" in command) is expected


def test_demonstrations_of_a_simulator_that_only_the_other_interpreter_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("metaworld")
    for name in [name for name in sys.modules if name.partition(".")[0] == "metaworld"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "metaworld", None)  # as if it were not installed here
    flags = ["--task_suite_name", "metaworld", "--task_names", "reach", "--image_size", "32", "--num_demos", "2"]
    collect_demos([*flags, "--env_python", sys.executable, "--num_envs", "1", "--output", str(tmp_path / "demos")])
    demos = read_demonstrations(tmp_path / "demos" / "demos.hdf5")
    (reach,) = (task for task in TASKS if task.name == "reach")
    assert demos.instructions == [reach.instruction] * 2 and all(demos.success)
