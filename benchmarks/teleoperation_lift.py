"""robosuite Lift by key presses alone: a headless Chromium drives the page of `cli/teleoperate.py`.

The keys are chosen from the simulator's state, one tap at a time. Writes the demonstration and a picture of the page.

Example:
  python benchmarks/teleoperation_lift.py --output runs/lift_keys
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import base64

from rlvla.commands import sockets
from rlvla.commands.demos.record import demonstration_writer
from rlvla.envs.config import EnvConfig
from rlvla.envs.workers.config import WorkerConfig
from rlvla.envs.workers.messages import PrivilegedState
from rlvla.teleoperation.controls import Controls, default_bindings
from rlvla.teleoperation.server import HOST, TeleoperationServer
from rlvla.teleoperation.session import Session
from tests.support.browser import Page, open_page
from tests.support.policy_server import running

_NEAR = 0.01  # meters
_METERS_PER_STEP = 0.02  # at the speed below, once it moves
_SETTLE_SECONDS = 0.15
_GRASP_STEPS = 8
_KEYS = (("s", "w"), ("d", "a"), ("f", "r"))  # negative, positive of x, y, z


class SeenSession(Session):
    """Keeps the simulator's state after each answer in `state`."""

    state: Any = None

    def _call(self, command: Any) -> Any:
        answer = super()._call(command)
        self.state = self._pool.call(0, PrivilegedState())
        return answer


def play(page: Page, state: Any, picture: Path) -> int:
    """Lift the cube; returns the number of key presses."""
    started = "document.getElementById('task').textContent && !document.getElementById('message').textContent"
    page.wait_for(started)
    presses = 0

    def hold(key: str, steps: int) -> None:
        nonlocal presses
        end = int(page.text("step")) + steps
        page.key("down", key)
        page.wait_for(f"document.getElementById('step').textContent >= {end}")
        page.key("up", key)
        presses += 1
        time.sleep(_SETTLE_SECONDS)  # the last step may be under way

    def move(target: Any, dims: range) -> None:
        while True:
            now = state()
            error = target(now) - now["eef_pos"]
            dim = max(dims, key=lambda axis: abs(error[axis]))
            if abs(error[dim]) < _NEAR:
                return
            hold(_KEYS[dim][int(error[dim] > 0)], max(1, int(abs(error[dim]) / _METERS_PER_STEP)))

    move(lambda now: now["cube_pos"], range(2))
    move(lambda now: now["cube_pos"], range(3))
    hold(" ", _GRASP_STEPS)
    page.key("down", "r")
    page.wait_for("document.getElementById('message').textContent.startsWith('success')")
    page.key("up", "r")
    picture.write_bytes(base64.b64decode(page.call("Page.captureScreenshot", format="png")["data"]))
    page.tap("Enter")
    page.wait_for("document.getElementById('kept').textContent.startsWith('1')")
    return presses + 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", default="runs/lift_keys")
    parser.add_argument("--state", type=int, default=0, help="initial state")
    options = parser.parse_args()
    folder = Path(options.output)
    env = EnvConfig(
        task_suite_name="robosuite", cameras=("agentview", "wrist"), image_size=256, use_proprio=True, max_steps=400
    )
    tasks = env.tasks()
    with WorkerConfig().pool(1) as pool:
        writer = demonstration_writer(folder / "demos.hdf5", env, tasks)
        session = SeenSession(pool, env.env_kwargs(), tasks, {0: iter([(options.state, 0), (1, 1)])}, writer)
        addresses: list[str] = []
        controls = Controls(default_bindings(tasks[0]), tasks[0], speed=0.5)
        server = TeleoperationServer(session, controls, env.camera_names, addresses.append)
        with running(server, sockets.listen(HOST, 0, "")):
            while not addresses:
                time.sleep(0.1)
            with open_page(folder / "profile", addresses[0], "1100,760") as page:
                begin = time.perf_counter()
                presses = play(page, lambda: session.state, folder / "page.png")
        writer.close()
    print(f"{presses} key presses, {time.perf_counter() - begin:.0f} s: {folder / 'demos.hdf5'}")


if __name__ == "__main__":
    main()
