"""Facts of a policy that cannot be are refused."""

from __future__ import annotations

import pytest

from rlvla.models.policy import PolicySpec


@pytest.mark.parametrize(("actions", "columns"), [(4, 6), (4, 0), (0, 4), (2, 1)])
def test_columns_that_do_not_divide_among_the_actions_are_refused(actions: int, columns: int) -> None:
    with pytest.raises(ValueError, match=f"{actions} actions per decision cannot have {columns} columns: give every"):
        PolicySpec(actions, 2, columns=columns, noise_shape=(columns,))


@pytest.mark.parametrize("columns", [4, 8, 12])
def test_every_action_has_equally_many_columns(columns: int) -> None:
    assert PolicySpec(4, 2, columns=columns, noise_shape=(columns,)).columns_per_action == columns // 4
