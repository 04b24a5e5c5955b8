"""A run with --live serves its page until it ends, and one without it serves none."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from cli.train_ppo_vla import main
from rlvla.commands.runs import training
from rlvla.trainer.live import live_page


def run(policy: Path, folder: Path, *more: str) -> None:
    flags = "--num_episodes 4 --rollout_batch_size 4 --n_samples_per_prompt 1 --train_batch_size 4 --max_epochs 1"
    flags += " --num_envs 1 --eval_episodes 1 --no-check_start --no-use_tensorboard --advantage_estimator reinforce"
    main(["--pretrain", str(policy), "--save_path", str(folder), *flags.split(), *more])


def test_the_page_lives_as_long_as_the_run(
    policy_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    seen: list[tuple[str, dict]] = []

    @contextmanager
    def watched(folder: Path, port: int) -> Iterator[str]:
        assert (folder, port) == (tmp_path / "run", 0)
        with live_page(folder, port) as address:
            yield address
            with urllib.request.urlopen(f"{address}status.json", timeout=60) as answer:  # training is over
                seen.append((address, json.load(answer)))

    monkeypatch.setattr(training, "live_page", watched)
    run(policy_folder, tmp_path / "run", "--live", "--live_port", "0")
    ((address, status),) = seen
    assert address in capsys.readouterr().out
    records = [json.loads(line) for line in status["metrics"].splitlines()]
    assert [record["step"] for record in records] == [0, 1, 1] and "rollout/success_at_end" in records[1]
    log = "\n".join(status["log"])
    assert "training\n  policy" in log and "iteration 1/1: success" in log
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(address, timeout=10)
    run(policy_folder, tmp_path / "other")
    assert len(seen) == 1 and "http://" not in capsys.readouterr().out
