"""What the commands start their workers with."""

import sys
from pathlib import Path

from rlvla.commands.setup import start_workers
from rlvla.envs.config import EnvConfig


def test_workers_run_with_the_interpreter_of_the_flag(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" -X other_interpreter "$@"\n')
    python.chmod(0o755)
    for asked, expected in ((str(python), True), (None, False)):
        env = EnvConfig(task_suite_name="toy_reach", env_python=asked)
        with start_workers(1, env, env.tasks()[0]) as pool:
            command = Path(f"/proc/{pool._pool.pid(0)}/cmdline").read_bytes()
        assert (b"other_interpreter" in command) is expected
