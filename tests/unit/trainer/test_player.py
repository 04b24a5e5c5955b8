"""The player of a run whose trainer cannot be made."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import Mock

import pytest

from rlvla.trainer import trainer
from rlvla.trainer.trainer import Trainer


@pytest.fixture
def setup() -> Mock:
    found = Mock()
    found.config.learner = "one that nobody has registered"
    return found


def test_it_is_closed_if_the_rest_fails(setup: Mock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    player = Mock()
    monkeypatch.setattr(trainer, "make_player", lambda *_: player)
    with pytest.raises(ValueError, match="one that nobody has registered"):
        Trainer(setup, Mock(), tmp_path, tmp_path)
    player.close.assert_called_once_with()


def test_what_prevents_it_is_raised_as_it_is(setup: Mock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer, "make_player", Mock(side_effect=OSError("no cluster")))
    with pytest.raises(OSError, match="no cluster"):
        Trainer(setup, Mock(), tmp_path, tmp_path)
