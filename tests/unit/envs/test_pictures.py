"""Images of cameras that are not square, in environments."""

from __future__ import annotations

import numpy as np
import pytest

from rlvla.envs import Observation, Suite, TaskSpec, make_env, register_suite
from rlvla.envs.chunks import ChunkRunner
from rlvla.envs.options import SuiteOptions
from rlvla.envs.pictures import ImageFit
from rlvla.envs.workers.answer_checks import AnswerChecker, BadAnswerError

WIDE = np.zeros((12, 16, 3), np.uint8)
WIDE[:, 8:] = 200  # dark on the left, bright on the right
WIDE[:, :2] = 100  # outside the centered square


@pytest.mark.parametrize(
    ("how", "row"),
    [("crop", [0, 0, 200, 200]), ("stretch", [50, 0, 200, 200]), ("pad", [50, 0, 200, 200])],
)
def test_images_become_squares(how: str, row: list[int]) -> None:
    fitted = ImageFit(4, how)(np.stack([WIDE, WIDE]))
    assert fitted.shape == (2, 4, 4, 3) and fitted.dtype == np.uint8
    np.testing.assert_allclose(fitted[0, 1, :, 0], row, atol=30)  # antialiased
    assert (fitted[:, 3] == 0).all() == (how == "pad"), "black below a wide image"
    tall = ImageFit(4, how)(WIDE.swapaxes(0, 1))
    np.testing.assert_array_equal(tall, fitted[0].swapaxes(0, 1))


def test_squares_of_that_size_stay_as_they_are() -> None:
    image = WIDE[:, :12]
    assert ImageFit(12, "crop")(image) is image


class WideEnv:
    """A camera of 12 x 16 pixels."""

    def __init__(self, task: TaskSpec):
        self.task, self._run = task, ChunkRunner(task.max_steps, 1)

    def reset(self, init_state_id: int, seed: int) -> Observation:
        self._run.begin()
        return self._look()

    def step_chunk(self, actions: np.ndarray, *, record_frames: bool = False):
        return self._run.play(
            actions, lambda action: (False, frozenset()), self._look, (lambda: WIDE) if record_frames else None
        )

    def close(self) -> None:
        self._run.end()

    def _look(self) -> Observation:
        return Observation(WIDE[None].copy(), None, self.task.instruction)


def wide_tasks(**kw) -> list[TaskSpec]:
    return [TaskSpec(suite="wide", instruction="look", max_steps=3, action_dim=2)]


@pytest.fixture(scope="module", autouse=True)
def _wide_suite():
    register_suite(
        "wide", Suite(wide_tasks, lambda task_id, **kw: WideEnv(wide_tasks()[0]), ("front",), options=SuiteOptions)
    )


@pytest.mark.parametrize("how", ["crop", "pad", "stretch", "native", None])
def test_environments_give_the_images_that_a_policy_was_trained_on(how: str | None) -> None:
    options = {"image_size": 8, "image_fit": how} if how else {"image_size": 8}
    env, checker = make_env("wide", 0, **options), AnswerChecker(wide_tasks()[0], options)
    observation = env.reset(0, 0)
    if how is None:
        with pytest.raises(BadAnswerError, match="--image_fit crop, pad or stretch"):
            checker.observation(observation)
        return
    checker.observation(observation)
    result = env.step_chunk(np.zeros((2, 2), np.float32), record_frames=True)
    checker.chunk(result, 2, record_frames=True)
    expected = WIDE if how == "native" else ImageFit(8, how)(WIDE)
    np.testing.assert_array_equal(observation.images[0], expected)
    np.testing.assert_array_equal(result.frames[-1], expected)
    env.close()
