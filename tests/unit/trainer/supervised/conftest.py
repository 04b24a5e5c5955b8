"""Fixtures of supervised training."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from rlvla.utils.errors import ConfigError


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], object]], list[str]]:
    """Runs a command that must be refused; returns the reasons."""

    def run(command: Callable[[], object]) -> list[str]:
        errors: list[ConfigError] = []

        def remember(prog: str, error: ConfigError) -> None:
            errors.append(error)
            raise SystemExit(2)

        monkeypatch.setattr("rlvla.utils.cli.command.fail", remember)
        with pytest.raises(SystemExit):
            command()
        return [problem.reason for problem in errors[0].problems]

    return run
