"""robosuite 1.5 in a second virtual environment, reached through workers (`--env_python`)."""

import json
import os
import subprocess
from pathlib import Path
from typing import ClassVar

import pytest

from rlvla.envs.config import EnvConfig
from rlvla.envs.experts.base import ExpertConfig
from rlvla.envs.registry import list_tasks
from rlvla.envs.testing import EnvContract
from rlvla.envs.workers.messages import EnvSpec, RunExpert
from rlvla.envs.workers.pool import EnvPool
from rlvla.envs.workers.processes import worker_environment
from rlvla.envs.workers.worker_env import WorkerEnv
from tests.support.robosuite_reference import require_simulator

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def python():
    """The interpreter of that environment; skips where there is none."""
    path = Path(os.environ.get("RLVLA_ROBOSUITE15_PYTHON") or ROOT / ".venv-robosuite15" / "bin" / "python")
    if not path.is_file():
        pytest.skip(f"no {path}: make it with examples/scripts/install_robosuite15.sh, or set RLVLA_ROBOSUITE15_PYTHON")
    require_simulator()  # the same GL is needed
    return str(path)


@pytest.fixture(scope="module")
def pool(python):
    with EnvPool(2, python=python) as pool:
        yield pool


def test_it_is_accepted_and_has_the_same_tasks(python):
    config = EnvConfig(task_suite_name="robosuite", task_ids=(0, 5), env_python=python)
    assert config.tasks() == [list_tasks("robosuite")[i] for i in (0, 5)]


@pytest.mark.slow
def test_physics_of_all_tasks_is_that_of_robosuite_15(python):
    environment = worker_environment({})
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "tests" / "support")])
    script = ROOT / "tests" / "support" / "compare_with_stock.py"
    done = subprocess.run([python, str(script)], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.strip().splitlines()[-1])
    assert found["version"].startswith("1.5.")
    for name, (worst, moved) in found["deviations"].items():
        # Rotations are rounded to single precision in robosuite, and contacts amplify that.
        assert worst < 1e-5 and moved > 0.1, f"{name}: off by {worst} after moving by {moved} rad"
    assert len(found["deviations"]) == len(list_tasks("robosuite"))


def test_expert_lifts_and_workers_are_silent(pool, capfd):
    episode = pool.call(0, RunExpert(EnvSpec("robosuite", 0, {"image_size": 16}), 0, 0, ExpertConfig()))
    assert episode["success_at_end"]
    out, err = capfd.readouterr()
    assert "WARNING" not in out + err


@pytest.mark.slow
class TestLiftOfRobosuite15(EnvContract):
    """The contract, every test of it played by workers of the other interpreter."""

    suite = "robosuite"
    options: ClassVar = {"image_size": 32}
    hold_steps = 5
    _pool: ClassVar[EnvPool | None] = None
    _made = 0

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def _workers(cls, pool):
        cls._pool, cls._made = pool, 0

    @classmethod
    def make(cls, **more):
        """The first worker keeps the environment shared by all tests, the second plays all others."""
        worker, cls._made = min(cls._made, 1), cls._made + 1
        return WorkerEnv(cls._pool, worker, EnvSpec(cls.suite, cls.task_id, {**cls.options, **more}))
