"""The policy server, judged by the clients that it is made for, each in an interpreter of its own.

`RLVLA_OPENPI_PYTHON` names one with openpi-client 0.1.2, `RLVLA_VLA_EVAL_PYTHON` one with vla-eval 0.8.0.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("websockets")
pytest.importorskip("msgpack")

from rlvla.models.families import check_checkpoint
from tests.support.policy_server import Running, serving

OBSERVATION = """
import json, sys
import numpy as np
def observation(number):
    rng = np.random.default_rng(number)
    return rng.integers(0, 255, (64, 64, 3), np.uint8), rng.random(2, np.float32)
"""
OPENPI = (
    OBSERVATION
    + """
from openpi_client.websocket_client_policy import WebsocketClientPolicy
policy = WebsocketClientPolicy("127.0.0.1", int(sys.argv[1]), api_key=sys.argv[2])
answers = []
for number in range(3):
    image, state = observation(number)
    answer = policy.infer({"observation/image": image, "observation/state": state, "prompt": "reach the target"})
    answers.append(answer["actions"].tolist())
try:
    policy.infer({"image": image})
except RuntimeError as error:
    refusal = str(error)
print(json.dumps([policy.get_server_metadata()["action_horizon"], answers, refusal]))
"""
)
VLA_EVAL = (
    OBSERVATION
    + """
import asyncio
from vla_eval.connection import Connection
from vla_eval.runners.sync_runner import SyncEpisodeRunner
class Bench:
    def __init__(self, camera):
        self.camera, self.actions = camera, []
    async def start_episode(self, task, recorder=None): pass
    async def get_observation(self):
        image, state = observation(len(self.actions))
        return {"images": {self.camera: image}, "states": state, "task_description": "reach the target"}
    async def apply_action(self, action): self.actions.append(action["actions"].tolist())
    async def is_done(self): return len(self.actions) == 6
    async def get_time(self): return 0.0
    async def get_result(self): return {"success": True}
async def main():
    async with Connection(f"ws://127.0.0.1:{sys.argv[1]}/vla-eval", max_retries=1) as conn:
        episodes = []
        for _ in range(2):
            bench = Bench("top")
            result = await SyncEpisodeRunner().run_episode(bench, {"name": "reach"}, conn, max_steps=10)
            episodes.append(bench.actions)
        try:
            await SyncEpisodeRunner().run_episode(Bench("left"), {"name": "reach"}, conn)
        except Exception as error:
            refusal = str(error)
        bench = Bench("top")  # the connection goes on
        await SyncEpisodeRunner().run_episode(bench, {"name": "reach"}, conn, max_steps=10)
        print(json.dumps([conn.server_info["protocol_version"], [*episodes, bench.actions], result["steps"], refusal]))
asyncio.run(main())
"""
)
KEY = "a-key-for-these-tests"


def client(variable: str, script: str, *argv: str) -> Any:
    """What a script printed in the interpreter that an environment variable names."""
    python = os.environ.get(variable)
    if python is None:
        pytest.skip(f"{variable} names no interpreter")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([python, "-c", script, *argv], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def server(policy_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with serving(policy_folder) as run:
        yield run


def chunks(folder: Path, numbers: list[int]) -> list[np.ndarray]:
    """The folder's own actions for the observations of the scripts."""
    policy: Any = check_checkpoint(folder).load_policy().eval()
    actions = []
    for number in numbers:
        rng = np.random.default_rng(number)
        image, state = rng.integers(0, 255, (64, 64, 3), np.uint8), rng.random(2, np.float32)
        images, proprio = policy.prepare(image[None], state)
        decision = policy.act(images[None], proprio[None], ["reach the target"], noise=None, temperature=1.0)
        actions.append(decision.actions[0])
    return actions


def test_openpi_client(policy_folder: Path, tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text(KEY)
    with serving(policy_folder, api_key_file=str(key)) as run:
        horizon, answers, refusal = client("RLVLA_OPENPI_PYTHON", OPENPI, str(run.port), KEY)
    assert horizon == 4 and "the request lacks observation/image" in refusal
    np.testing.assert_allclose(answers, chunks(policy_folder, [0, 1, 2]), atol=1e-6)


def test_vla_eval(server: Running, policy_folder: Path) -> None:
    version, episodes, steps, refusal = client("RLVLA_VLA_EVAL_PYTHON", VLA_EVAL, str(server.port))
    first, second = chunks(policy_folder, [0, 4])
    assert version == 1 and steps == 6 and "images/top" in refusal and "images/left" in refusal
    for played in episodes:
        np.testing.assert_allclose(played, [*first, *second[:2]], atol=1e-6)
