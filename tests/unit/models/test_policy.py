"""Facts of a policy that cannot be are refused."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import pytest

from rlvla.models.config import ActorConfig, PolicyConfig
from rlvla.models.families import check_checkpoint, checkpoint_option_problems, checkpoint_overrides
from rlvla.models.policy import PolicySpec
from rlvla.options import unmet_condition
from rlvla.utils.errors import ConfigError


@pytest.mark.parametrize(("actions", "columns"), [(4, 6), (4, 0), (0, 4), (2, 1)])
def test_columns_that_do_not_divide_among_the_actions_are_refused(actions: int, columns: int) -> None:
    with pytest.raises(ValueError, match=f"{actions} actions per decision cannot have {columns} columns"):
        PolicySpec(actions, 2, columns=columns, noise_shape=(columns,))


@pytest.mark.parametrize("columns", [4, 8, 12])
def test_every_action_has_equally_many_columns(columns: int) -> None:
    assert PolicySpec(4, 2, columns=columns, noise_shape=(columns,)).columns_per_action == columns // 4


def test_features_of_a_critic_are_read_where_there_is_one() -> None:
    (option,) = (field for field in fields(PolicyConfig) if field.name == "critic_features")
    assert unmet_condition(option, {"advantage_estimator": "gae"}) is None
    assert (
        unmet_condition(option, {"advantage_estimator": "grpo"}) == unmet_condition(option, {}) == "there is no critic"
    )


def test_settings_of_flow_policies_are_refused_for_others(policy_folder: Path) -> None:
    with pytest.raises(ConfigError) as error:
        checkpoint_overrides(policy_folder, SimpleNamespace(flow_steps=3, camera_map=("top=image",)))
    assert "--flow_steps" in str(error.value) and "--camera_map" in str(error.value)
    problems = checkpoint_option_problems(check_checkpoint(policy_folder), ActorConfig(train_expert_only=True))
    assert [(problem.flag, problem.reason) for problem in problems] == [("train_expert_only", "no_effect")]
