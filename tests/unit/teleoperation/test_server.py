"""The server of the page: its one-time address, the protocol, and what becomes of the robot when the page is gone."""

from __future__ import annotations

import io
import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from PIL import Image

pytest.importorskip("websockets")

from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection, connect

from rlvla.commands import sockets
from rlvla.commands.demos.record import demonstration_writer
from rlvla.data.reading import read_demonstrations
from rlvla.envs.config import EnvConfig
from rlvla.envs.toy_reach.env import STEP_SIZE
from rlvla.envs.workers.config import WorkerConfig
from rlvla.envs.workers.messages import PrivilegedState
from rlvla.envs.workers.watchdog import WatchedPool
from rlvla.teleoperation import server as server_module
from rlvla.teleoperation.controls import ADVANCE, Controls, default_bindings, read_bindings
from rlvla.teleoperation.pilot import Pilot
from rlvla.teleoperation.server import HOST, TeleoperationServer
from rlvla.teleoperation.session import Session
from tests.support.policies import ScriptedPolicy
from tests.support.policy_server import running
from tests.support.teleoperation import open_socket, send, state_where, tap

ENV = EnvConfig(task_suite_name="toy_reach", use_proprio=True, max_steps=40)
(TASK,) = ENV.tasks()
STATE = 4


@pytest.fixture(scope="module")
def pool() -> Iterator[WatchedPool]:
    with WorkerConfig().pool(1) as pool:
        yield pool


class Teleoperation:
    """A running server with its session and the addresses that it announced."""

    def __init__(
        self,
        pool: WatchedPool,
        folder: Path,
        bindings: Any = None,
        pilot: Pilot | None = None,
        keep_failures: bool = True,
        **options: Any,
    ):
        self.writer = demonstration_writer(folder / "demos.hdf5", ENV, [TASK], "person")
        planned = {0: iter((STATE + i, i) for i in range(99))}
        self.session = Session(pool, ENV.env_kwargs(), [TASK], planned, self.writer, pilot, keep_failures=keep_failures)
        self.addresses: list[str] = []
        controls = Controls(bindings or default_bindings(TASK), TASK, speed=1.0)
        self.server = TeleoperationServer(self.session, controls, ["top"], self.addresses.append, **options)

    def get(self, path: str) -> tuple[int, str]:
        """Status and text of a page of the server."""
        try:
            with urllib.request.urlopen(f"http://{HOST}:{self.port}{path}", timeout=20) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def new_address(self, number: int) -> str:
        """Path of the address with this number, which may yet have to be announced."""
        wait_for(lambda: len(self.addresses) > number)
        return self.addresses[number].removeprefix(f"http://{HOST}:{self.port}")

    def open(self, number: int = 0) -> ClientConnection:
        """Open the page at the address with this number, as a browser does."""
        return open_socket(f"http://{HOST}:{self.port}{self.new_address(number)}")


@contextmanager
def teleoperation(pool: WatchedPool, folder: Path, **options: Any) -> Iterator[Teleoperation]:
    run = Teleoperation(pool, folder, **options)
    with running(run.server, sockets.listen(HOST, 0, "--port 0")) as server:
        run.port = server.port
        yield run


def wait_for(condition: Any) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def drive_to_the_disc(run: Teleoperation, page: ClientConnection) -> dict[str, Any]:
    """Tap onto the named disc and rest there; the last state."""
    disc = run.session._pool.call(0, PrivilegedState())
    east, north = np.rint((disc["target"] - disc["effector"]) / STEP_SIZE).astype(int)
    x, y = "d" if east > 0 else "a", "w" if north > 0 else "s"
    state: dict[str, Any] = {"phase": "playing"}
    for number in range(TASK.max_steps):
        moves = [name for name, count in ((x, abs(east)), (y, abs(north))) if number < count]
        tap(page, *(moves or [ADVANCE]))
        state = state_where(page, step=number + 1)
        if state["phase"] == "ended":
            break
    return state


def test_the_address_works_once_and_only_with_its_token(pool: WatchedPool, tmp_path: Path) -> None:
    with teleoperation(pool, tmp_path) as run:
        path = run.new_address(0)
        for wrong in ("/", "/?token=", "/?token=wrong", "/?other=1", "/socket?key=wrong"):
            status, text = run.get(wrong)
            assert status == 403 and "lacks the token" in text, wrong
        assert run.get("/other")[0] == 404
        with run.open() as page:
            hello = json.loads(page.recv(timeout=20))
            assert hello["cameras"] == ["top"] and len(hello["bindings"]) == 2
            status, text = run.get(path)
            assert status == 410 and "has been opened before" in text and "terminal shows a new address" in text
            assert len(run.addresses) == 1
        assert run.new_address(1) != path, "after the page is closed, the terminal shows another address"
        assert run.get(path)[0] == 410


def test_other_pages_of_the_browser_are_refused(pool: WatchedPool, tmp_path: Path) -> None:
    with teleoperation(pool, tmp_path) as run:
        page = run.get(run.new_address(0))[1]
        key = page.partition("/socket?key=")[2].partition("`")[0]
        address = f"ws://{HOST}:{run.port}/socket?key={key}"
        for origin in ("http://elsewhere.example", None):
            with pytest.raises(InvalidStatus):
                connect(address, origin=origin, proxy=None)
        with connect(address, origin=f"http://{HOST}:{run.port}", proxy=None):
            pass
        with pytest.raises(InvalidStatus):
            connect(address, origin=f"http://{HOST}:{run.port}", proxy=None)


def test_a_page_that_never_connects_is_replaced(
    pool: WatchedPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "_OPEN_SECONDS", 0.05)
    with teleoperation(pool, tmp_path) as run:
        assert run.get(run.new_address(0))[0] == 200
        assert run.get(run.new_address(1))[0] == 200


def test_an_episode_by_taps_is_kept_as_a_demonstration(pool: WatchedPool, tmp_path: Path) -> None:
    with teleoperation(pool, tmp_path) as run:
        with run.open() as page:
            picture = next(m for m in iter(lambda: page.recv(timeout=20), None) if isinstance(m, bytes))
            assert picture[0] == 0 and Image.open(io.BytesIO(picture[1:])).size == (64, 64)
            assert state_where(page, phase="playing")["instruction"].startswith("reach the ")
            send(page, "keep")
            state_where(page, message="nothing to keep: the episode has no steps, or the simulator failed")
            tap(page, "s")
            state_where(page, step=1)
            send(page, "restart")
            state_where(page, step=0, phase="playing")
            ended = drive_to_the_disc(run, page)
            assert (ended["phase"], ended["message"]) == ("ended", "success")
            tap(page, "w")  # has no effect
            send(page, "keep")
            assert state_where(page, kept=1, phase="playing")["step"] == 0
            for number in (1, 2):
                tap(page, "d")
                state_where(page, step=number)
            send(page, "discard")
            state_where(page, step=0, phase="playing", kept=1)
            unfinished = tmp_path / "copy.hdf5"  # as after a kill
            unfinished.write_bytes((tmp_path / ".demos.hdf5.part").read_bytes())
            send(page, "finish")
            state_where(page, message="finished: the page can be closed")
        run.writer.close()
    for file in (tmp_path / "demos.hdf5", unfinished):
        demos = read_demonstrations(file)
        (actions,), steps = demos.actions, ended["step"]
        assert demos.success == [True] and len(actions) == steps and np.abs(actions).max() == 1
        assert demos.instructions == [ended["instruction"]] and demos.init_states == [(0, STATE)]
        assert demos.images[0].shape == (steps, 1, 64, 64, 3) and demos.proprio[0].shape == (steps, 2)
    assert (tmp_path / "dataset_statistics.json").exists()
    with h5py.File(tmp_path / "demos.hdf5") as file:
        assert json.loads(file["data"].attrs["env_args"])["task_suite_name"] == "toy_reach"


def test_a_closed_page_stops_the_robot_and_the_episode_goes_on_in_a_new_one(pool: WatchedPool, tmp_path: Path) -> None:
    with teleoperation(pool, tmp_path) as run:
        with run.open() as page:
            send(page, "controls", held={"d": 1})
            state_where(page, step=1)
        steps = run.session.steps
        with run.open(1) as page:
            state = state_where(page, type="state")
            time.sleep(0.3)  # three steps of a held key
            assert state["action"] == [0, 0] and run.session.steps in (steps, steps + 1), "one may have been under way"
            steps = run.session.steps
            tap(page, "w")
            state_where(page, step=steps + 1)


def test_a_clock_steps_on_without_keys_and_ends_with_a_zero_action(pool: WatchedPool, tmp_path: Path) -> None:
    with teleoperation(pool, tmp_path, clock=True) as run:
        with run.open() as page:
            time.sleep(0.3)
            assert run.session.steps == 0, "the clock begins with the first key"
            send(page, "controls", held={"d": 1})
            send(page, "controls", held={})
            state_where(page, step=3)
            send(page, "controls", held={"d": 1})
            state_where(page, action=[1, 0])
        run.new_address(1)
        time.sleep(0.3)
        steps = run.session.steps
        time.sleep(0.3)
        assert run.session.steps == steps < TASK.max_steps
        actions = run.session._recorder.episode()["actions"]
        assert actions[0].tolist() == [1, 0] and actions[1].tolist() == [0, 0] == actions[-1].tolist()


def test_keys_of_a_silent_page_are_released(pool: WatchedPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "_SILENCE_SECONDS", 0.15)
    with teleoperation(pool, tmp_path) as run, run.open() as page:
        send(page, "controls", held={"d": 1})
        state = state_where(page, message="no sign of the page: the robot has stopped")
        assert 1 <= state["step"] < TASK.max_steps and state["action"] == [0, 0]


@pytest.mark.parametrize(
    "message",
    [
        "{",
        "[]",
        '{"type": "no"}',
        '{"type": "controls", "held": {"d": NaN}}',
        '{"type": "speed", "value": 2}',
        b"\0",
        "[" * 9000,
    ],
)
def test_a_message_that_no_page_sends_ends_the_connection(pool: WatchedPool, tmp_path: Path, message: Any) -> None:
    with teleoperation(pool, tmp_path) as run, run.open() as page:
        page.send(message)
        with pytest.raises(ConnectionClosed) as closed:
            state_where(page, type="never")
        assert closed.value.rcvd.code == 1008
        run.new_address(1)


def test_a_failing_simulator_is_reported_and_restarts(
    pool: WatchedPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with teleoperation(pool, tmp_path) as run, run.open() as page:
        state_where(page, phase="playing")
        pool.replace(0)  # as if its process had died
        tap(page, "d")
        assert "the simulator failed: " in state_where(page, phase="failed")["message"]
        send(page, "keep")
        state_where(page, message="nothing to keep: the episode has no steps, or the simulator failed")
        send(page, "restart")
        state_where(page, phase="playing")
        tap(page, "d")
        assert state_where(page, step=1)["phase"] == "playing"


def test_it_ends_after_the_wanted_episodes(pool: WatchedPool, tmp_path: Path) -> None:
    with teleoperation(pool, tmp_path, wanted=1) as run, run.open() as page:
        tap(page, "d")
        state_where(page, step=1)
        send(page, "keep")
        state_where(page, message="finished: the page can be closed", kept=1)
        with pytest.raises(ConnectionClosed):
            state_where(page, type="never")
    assert len(run.addresses) == 1, "there is nothing to go on with"


class Counting(ScriptedPolicy):
    """Chunks of ten actions [0.01 n, 0.5]: n counts the actions of all its decisions, and the gripper closes."""

    def actions(self, images: np.ndarray, proprio: np.ndarray | None, noise: np.ndarray | None) -> np.ndarray:
        first = 10 * (len(self.batches) - 1)
        return np.array([[[0.01 * (first + n), 0.5] for n in range(10)]])


def beside_a_policy(pool: WatchedPool, folder: Path, **options: Any) -> Any:
    """A page of a policy, where a/d move dimension 0, and space toggles dimension 1 as a gripper."""
    bindings = read_bindings(["0:a/d", "1:space"], TASK)
    return teleoperation(pool, folder, bindings=bindings, pilot=Pilot(Counting(10, 2)), **options)


def test_a_person_takes_over_from_a_policy_and_gives_back(pool: WatchedPool, tmp_path: Path) -> None:
    with beside_a_policy(pool, tmp_path, wanted=1) as run, run.open() as page:
        assert json.loads(page.recv(timeout=20))["policy"] is True
        assert state_where(page, phase="playing")["playing"] is False
        time.sleep(0.3)
        assert run.session.steps == 0, "the policy waits for play"
        send(page, "play")
        state_where(page, actor="policy", step=2, playing=True)
        send(page, "controls", held={"d": 1})
        begin = state_where(page, actor="you")["step"]
        tap(page, "space")
        state_where(page, actor="you", step=begin + 1)
        send(page, "controls", held={})
        state_where(page, actor="policy", action=[0.11, 0.5])
        send(page, "pause")
        interventions = state_where(page, playing=False)["interventions"]
        steps = run.session.steps
        time.sleep(0.3)
        assert run.session.steps == steps, "the simulator stands still"
        tap(page, "a")
        state_where(page, step=steps + 1, actor="you", playing=False)
        send(page, "keep")
        state_where(page, kept=1)
    run.writer.close()
    demos = read_demonstrations(tmp_path / "demos.hdf5")
    (actions,), (flags,) = demos.actions, demos.interventions
    assert flags.tolist() == (np.abs(actions[:, 1]) == 1).tolist()
    assert flags.sum() == run.session.totals.interventions == interventions + 1
    assert len(flags) == run.session.totals.steps and flags[begin - 1] and not flags[: begin - 1].any()
    person = actions[flags].tolist()
    assert person[0] == [1, 1] and [0, -1] in person and person[-1] == [-1, 1], "the policy's gripper, toggled once"
    policy = np.rint(100 * actions[~flags, 0]).astype(int).tolist()
    assert policy[: begin + 1] == [*range(begin - 1), 10, 11] and begin < 10, "the rest of the first chunk is dropped"


def test_a_policy_pauses_when_nobody_watches(
    pool: WatchedPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with beside_a_policy(pool, tmp_path) as run:
        with run.open() as page:
            send(page, "play")
            state_where(page, step=2)
        with run.open(1) as page:
            time.sleep(0.3)
            steps = run.session.steps
            state = state_where(page, step=steps)
            assert not state["playing"] and state["interventions"] == 0 and steps < 10
            assert run.session._recorder.episode()["actions"][-1].tolist() == [0, 1], "a zero action is the last"
            monkeypatch.setattr(server_module, "_SILENCE_SECONDS", 0.25)
            send(page, "play")
            state = state_where(page, message="no sign of the page: the robot has stopped", playing=False)
            actions = run.session._recorder.episode()["actions"]
            assert actions[steps].tolist() == pytest.approx([0.1, 0.5]), "it decides anew"
            assert actions[-1].tolist() == [0, 1] and state["interventions"] == 0


@pytest.mark.parametrize("person", ["takes over", "pauses", "leaves"])
def test_a_decision_that_comes_too_late_is_not_executed(pool: WatchedPool, tmp_path: Path, person: str) -> None:
    asked, may_answer = threading.Event(), threading.Event()

    class Slow(Counting):
        def actions(self, *observed: Any) -> np.ndarray:
            asked.set()
            assert may_answer.wait(20)
            return super().actions(*observed)

    pilot = Pilot(Slow(10, 2))
    with teleoperation(pool, tmp_path, pilot=pilot) as run, run.open() as page:
        send(page, "play")
        assert asked.wait(20)
        if person == "leaves":
            page.close()
            run.new_address(1)
        else:
            send(page, "controls", held={"d": 1 if person == "takes over" else 0})
            send(page, "play" if person == "takes over" else "pause")
            send(page, "speed", value=0.75)
            wait_for(lambda: run.server._controls.speed == 0.75)
        may_answer.set()
        wait_for(lambda: run.session.steps or not pilot.needs_decision)
        time.sleep(0.2)
        assert run.session.steps == run.session.interventions and bool(run.session.steps) == (person == "takes over")


def test_a_failure_is_kept_only_where_that_is_asked_for(pool: WatchedPool, tmp_path: Path) -> None:
    with beside_a_policy(pool, tmp_path, keep_failures=False) as run, run.open() as page:
        tap(page, "d")
        state_where(page, step=1)
        send(page, "keep")
        state_where(page, message="not kept: the episode has not ended in success, and --keep all is not given")
        tap(page, "space")
        assert state_where(page, step=2)["kept"] == 0, "the episode goes on"


def test_play_is_for_policies(pool: WatchedPool, tmp_path: Path) -> None:
    with teleoperation(pool, tmp_path) as run, run.open() as page:
        send(page, "play")
        with pytest.raises(ConnectionClosed):
            state_where(page, type="never")
