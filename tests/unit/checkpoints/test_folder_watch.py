"""A run whose folder is deleted warns once, and continues in a new one."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from rlvla.checkpoints.run_folder import RUN_FILE, FolderWatch, claimed_run_folder, run_folder_problem
from rlvla.trainer.metrics_writer import MetricsLogger
from rlvla.utils.cli.config_file import RUN_CONFIG_FILE
from rlvla.utils.files import read_metrics


class OneRank:
    is_main = True

    def barrier(self) -> None:
        pass


def test_a_deleted_folder_is_made_again_with_its_records(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    folder = tmp_path / "runs" / "ppo"
    with claimed_run_folder(folder, OneRank()):
        (folder / RUN_FILE).write_text("{}")
        (folder / RUN_CONFIG_FILE).write_text("seed: 3\n")
        logger = MetricsLogger(folder, use_tensorboard=True)
        logger.log({"loss": 1.0}, 1)
        watch = FolderWatch(folder)
        assert not watch.restored() and not capsys.readouterr().err

        shutil.rmtree(tmp_path / "runs")
        assert watch.restored()
        said = capsys.readouterr().err
        assert str(folder) in said and len(said.splitlines()) == 1
        logger.reopen()
        logger.log({"loss": 2.0}, 2)
        assert not watch.restored() and not capsys.readouterr().err, "said once"
        assert [record["step"] for record in read_metrics(folder)] == [2]
        assert list((folder / "tensorboard").iterdir())
        assert (folder / RUN_CONFIG_FILE).read_text() == "seed: 3\n" and (folder / RUN_FILE).is_file()
        assert "another process" in str(run_folder_problem(folder)), "it is claimed as before"
        logger.close()


def test_a_folder_that_cannot_be_created_again_does_not_end_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    (tmp_path / "runs" / "ppo").mkdir(parents=True)
    watch = FolderWatch(tmp_path / "runs" / "ppo")
    shutil.rmtree(tmp_path / "runs")
    (tmp_path / "runs").touch()
    assert not watch.restored()
    assert "cannot be created again" in capsys.readouterr().err


@pytest.mark.parametrize("left", [".policy.part", ".best_policy.part"])
def test_a_claim_removes_leftovers_of_a_killed_run(tmp_path: Path, left: str) -> None:
    (tmp_path / left).mkdir()
    with claimed_run_folder(tmp_path, OneRank()):
        assert not (tmp_path / left).exists()
