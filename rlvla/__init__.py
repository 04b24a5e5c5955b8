"""rlvla: reinforcement-learning post-training of vision-language-action robot policies.

The names below are what scripts of your own are built from (docs/library.md). Each is imported on first use, so that
`import rlvla` costs nothing and parts that need only torch and numpy work without the rest.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from rlvla.version import __version__ as __version__

if TYPE_CHECKING:
    from rlvla.algorithms import get_advantage_estimator as get_advantage_estimator
    from rlvla.algorithms import get_policy_loss as get_policy_loss
    from rlvla.algorithms import register_advantage_estimator as register_advantage_estimator
    from rlvla.algorithms import register_policy_loss as register_policy_loss
    from rlvla.checkpoints.policy_folder import PolicyRecord as PolicyRecord
    from rlvla.checkpoints.policy_folder import recorded_environment as recorded_environment
    from rlvla.checkpoints.policy_folder import write_policy as write_policy
    from rlvla.commands.score_episodes import score_recorded as score_recorded
    from rlvla.data.demonstrations import Demonstrations as Demonstrations
    from rlvla.data.reading import read_demonstrations as read_demonstrations
    from rlvla.envs import ChunkResult as ChunkResult
    from rlvla.envs import Env as Env
    from rlvla.envs import Observation as Observation
    from rlvla.envs import TaskSpec as TaskSpec
    from rlvla.envs import list_tasks as list_tasks
    from rlvla.envs import make_env as make_env
    from rlvla.envs import register_suite as register_suite
    from rlvla.envs.config import EnvConfig as EnvConfig
    from rlvla.envs.config import SplitConfig as SplitConfig
    from rlvla.envs.gymnasium.wrapper import gym_env as gym_env
    from rlvla.envs.gymnasium.wrapper import gym_vector_env as gym_vector_env
    from rlvla.envs.splits import LearnedStates as LearnedStates
    from rlvla.envs.splits import train_init_states as train_init_states
    from rlvla.envs.workers.pool import EnvPool as EnvPool
    from rlvla.envs.workers.watchdog import WatchedPool as WatchedPool
    from rlvla.evaluation.evaluate import evaluate as evaluate
    from rlvla.evaluation.results import EvalResult as EvalResult
    from rlvla.evaluation.results import Rate as Rate
    from rlvla.evaluation.videos import captioned as captioned
    from rlvla.experience import Experience as Experience
    from rlvla.experience import Sample as Sample
    from rlvla.models.actor import Actor as Actor
    from rlvla.models.config import ActorConfig as ActorConfig
    from rlvla.models.policy import Decision as Decision
    from rlvla.models.policy import Policy as Policy
    from rlvla.models.policy import PolicySpec as PolicySpec
    from rlvla.models.policy import RolloutPolicy as RolloutPolicy
    from rlvla.models.reference import ReferenceModel as ReferenceModel
    from rlvla.models.value_models import Critic as Critic
    from rlvla.models.value_models import RewardModel as RewardModel
    from rlvla.rewards import RewardConfig as RewardConfig
    from rlvla.rewards import RewardPlan as RewardPlan
    from rlvla.rewards import register_reward as register_reward
    from rlvla.rollout.config import RolloutConfig as RolloutConfig
    from rlvla.rollout.engine import RolloutEngine as RolloutEngine
    from rlvla.rollout.episode import EpisodeRequest as EpisodeRequest
    from rlvla.rollout.task_sampler import TaskSampler as TaskSampler
    from rlvla.utils.errors import ConfigError as ConfigError
    from rlvla.utils.errors import MissingExtraError as MissingExtraError
    from rlvla.utils.video import write_mp4 as write_mp4

# Module below this package -> its public names, as for type checkers above.
_HOMES = {
    "algorithms": (
        *("get_advantage_estimator", "get_policy_loss"),
        *("register_advantage_estimator", "register_policy_loss"),
    ),
    "checkpoints.policy_folder": ("PolicyRecord", "recorded_environment", "write_policy"),
    "commands.score_episodes": ("score_recorded",),
    "data.demonstrations": ("Demonstrations",),
    "data.reading": ("read_demonstrations",),
    "envs": ("ChunkResult", "Env", "Observation", "TaskSpec", "list_tasks", "make_env", "register_suite"),
    "envs.config": ("EnvConfig", "SplitConfig"),
    "envs.gymnasium.wrapper": ("gym_env", "gym_vector_env"),
    "envs.splits": ("LearnedStates", "train_init_states"),
    "envs.workers.pool": ("EnvPool",),
    "envs.workers.watchdog": ("WatchedPool",),
    "evaluation.evaluate": ("evaluate",),
    "evaluation.results": ("EvalResult", "Rate"),
    "evaluation.videos": ("captioned",),
    "experience": ("Experience", "Sample"),
    "models.actor": ("Actor",),
    "models.config": ("ActorConfig",),
    "models.policy": ("Decision", "Policy", "PolicySpec", "RolloutPolicy"),
    "models.reference": ("ReferenceModel",),
    "models.value_models": ("Critic", "RewardModel"),
    "rewards": ("RewardConfig", "RewardPlan", "register_reward"),
    "rollout.config": ("RolloutConfig",),
    "rollout.engine": ("RolloutEngine",),
    "rollout.episode": ("EpisodeRequest",),
    "rollout.task_sampler": ("TaskSampler",),
    "utils.errors": ("ConfigError", "MissingExtraError"),
    "utils.video": ("write_mp4",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = ["__version__", *sorted(_HOME_OF)]


if not TYPE_CHECKING:  # who would take every name to exist

    def __getattr__(name: str) -> Any:
        """Import on first use.

        Raises:
            MissingExtraError: a package that it needs is not installed.
        """
        if name not in _HOME_OF:
            raise AttributeError(f"module {__name__} has no attribute {name}")
        try:
            value = getattr(importlib.import_module(f"{__name__}.{_HOME_OF[name]}"), name)
        except ModuleNotFoundError as error:
            missing = (error.name or "").partition(".")[0]
            if missing in ("", __name__):
                raise
            from rlvla.utils.errors import MissingExtraError

            text = f"{__name__}.{name} needs {missing}, which is not installed. Install it with: pip install {__name__}"
            raise MissingExtraError(text) from None
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    """The public names, imported or not."""
    return sorted({*globals(), *__all__})
