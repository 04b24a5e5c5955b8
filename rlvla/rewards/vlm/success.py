"""A vision-language model as the judge of success."""

from __future__ import annotations

from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from rlvla.rewards.success_source import register_success_source
from rlvla.rewards.vlm.client import VLMResult
from rlvla.rewards.vlm.questions import Score
from rlvla.rewards.vlm.scorers import Scorer
from rlvla.rewards.vlm.server import VLMServer, words_of
from rlvla.utils.errors import ConfigError
from rlvla.utils.video import upright

if TYPE_CHECKING:
    from rlvla.envs.base import Observation, TaskSpec


@register_success_source("vlm")
class VLMSuccess:
    """Asks whether the task is done.

    Attributes:
        server: where the question is asked, shared with the reward sources of a plan.

    Raises:
        ConfigError: the server is not given, or cannot judge.
    """

    def __init__(self, config: Any):
        self._scorer = Scorer("success")
        self.server = VLMServer(config, "--success_source vlm")
        problems = self.server.problems(self._scorer)
        if problems:
            raise ConfigError(problems)
        self.server.register(self._scorer)

    def ask(self, task: TaskSpec, observation: Observation) -> Future[VLMResult]:
        """Ask about the first image."""
        image = upright(observation.images[0], task.images_flipped_vertically)
        return self.server.ask(self._scorer, words_of(task.name, observation), [image])

    def probability(self, answer: VLMResult) -> float | None:
        """The model's answer; None if there is none."""
        return answer.progress if isinstance(answer, Score) else None
