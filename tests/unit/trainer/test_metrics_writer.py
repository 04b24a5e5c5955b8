"""Where metrics go: a file always, TensorBoard and Weights & Biases on request."""

from __future__ import annotations

import io
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams import backend_context
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData
from tensorboard.summary.writer import event_file_writer

from rlvla.trainer.config import LoggingConfig
from rlvla.trainer.metrics_writer import MetricsLogger
from rlvla.utils import terminal as logging
from rlvla.utils.errors import MissingExtraError
from rlvla.utils.files import read_metrics
from tests.support.disks import needs_root, small_disk


@pytest.fixture(autouse=True)
def event_files_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of one second are read in the order of their names, which end in a number without leading zeros."""
    monkeypatch.setattr(event_file_writer, "_global_uid", event_file_writer.AtomicCounter(0))


@dataclass(frozen=True)
class Settings:
    gamma: float = 0.99
    clip: float = 0.2
    seed: int = 0
    fast: bool = False


@dataclass(frozen=True)
class Networks:
    reward: tuple[str, ...] = ("success:1.0",)
    server: str | None = None


def test_metrics_are_written_for_people_and_for_tensorboard(tmp_path: Path) -> None:
    logger = MetricsLogger(tmp_path, use_tensorboard=True, overview={"a/x": "0_overview/x"})
    logger.log({"a/x": 1.0}, 1)
    logger.log({"a/x": 2.0}, 2)
    logger.log({"eval/y": 5.0}, 2)
    logger.close()
    again = MetricsLogger(tmp_path, use_tensorboard=False)  # a resumed run repeats step 2
    again.log({"a/x": 3.0}, 2)
    again.close()
    records = read_metrics(tmp_path)
    assert [(r["step"], r["a/x"]) for r in records] == [(1, 1.0), (2, 3.0)]
    assert records[1]["eval/y"] == 5.0
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(e.step, e.value) for e in events.Scalars("a/x")] == [(1, 1.0), (2, 2.0)]
    assert [(e.step, e.value) for e in events.Scalars("0_overview/x")] == [(1, 1.0), (2, 2.0)]
    assert "overview" not in (tmp_path / "metrics.jsonl").read_text()


def logged(folder: Path) -> list[tuple[int, list[str]]]:
    """The lines of `metrics.jsonl` as they are: step, and names of the metrics."""
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [(line["step"], [name for name in line if "/" in name]) for line in lines]


def shown(folder: Path, name: str) -> list[tuple[int, float]]:
    """What TensorBoard shows of a scalar."""
    events = EventAccumulator(str(folder / "tensorboard")).Reload()
    return [(event.step, event.value) for event in events.Scalars(name)]


@pytest.mark.parametrize("evaluates_again", [False, True])
def test_a_resumed_run_holds_each_step_once(tmp_path: Path, evaluates_again: bool) -> None:
    """Killed after step 4 and resumed from the checkpoint of step 2, perhaps written before its evaluation."""
    first = MetricsLogger(tmp_path, use_tensorboard=True)
    for step in (1, 2, 3, 4):
        first.log({"a/x": float(step)}, step)
        first.log({"eval/y": 0.1 * step}, step)
    first.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "a/')
    again = MetricsLogger(tmp_path, use_tensorboard=True)
    again.rewind(2, evaluates_again=evaluates_again)
    if evaluates_again:
        again.log({"eval/y": 20.0}, 2)
    for step in (3, 4):
        again.log({"a/x": 10.0 * step}, step)
        again.log({"eval/y": 10.0 * step}, step)
    again.close()
    assert logged(tmp_path) == [(step, [name]) for step in (1, 2, 3, 4) for name in ("a/x", "eval/y")]
    assert shown(tmp_path, "a/x") == [(1, 1.0), (2, 2.0), (3, 30.0), (4, 40.0)]
    evaluated = 20.0 if evaluates_again else pytest.approx(0.2)
    assert shown(tmp_path, "eval/y") == [(1, pytest.approx(0.1)), (2, evaluated), (3, 30.0), (4, 40.0)]


def test_evaluating_a_checkpoint_again_replaces_its_evaluation_alone(tmp_path: Path) -> None:
    for value in (0.1, 0.2):
        logger = MetricsLogger(tmp_path, use_tensorboard=True)
        logger.describe([])
        if value > 0.1:
            logger.replace_evaluation({"eval/y": value}, 1)
        else:
            logger.log({"a/x": 1.0}, 1)
            logger.log({"eval/y": value}, 1)
            logger.log({"a/x": 2.0}, 2)
        logger.close()
    assert logged(tmp_path) == [(1, ["a/x"]), (1, ["eval/y"]), (2, ["a/x"])]
    assert shown(tmp_path, "a/x") == [(1, 1.0), (2, 2.0)]
    assert shown(tmp_path, "eval/y") == [(1, pytest.approx(0.2))]


def test_videos_of_later_steps_stay_when_an_evaluation_is_replaced(tmp_path: Path) -> None:
    for value in (0.1, 0.2):
        logger = MetricsLogger(tmp_path, use_tensorboard=True)
        for step in (1,) if value > 0.1 else (1, 2, 3):
            if value > 0.1:
                logger.replace_evaluation({"eval/y": value}, step)
            else:
                logger.log({"eval/y": value}, step)
            logger.video("videos/reach", np.full((3, 16, 16, 3), 100 * value, np.uint8), 10, step)
        logger.close()
    again = MetricsLogger(tmp_path, use_tensorboard=True)
    again.rewind(2, evaluates_again=False)
    again.log({"a/x": 1.0}, 3)
    again.close()
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    images = sorted(events.Images("videos/reach"), key=lambda image: image.step)
    assert [image.step for image in images] == [1, 2], "each step once; step 3 is played again"
    brightness = [np.asarray(Image.open(io.BytesIO(image.encoded_image_string)).convert("L")).max() for image in images]
    assert brightness == [20, 10]


@needs_root
def test_a_full_disk_delays_metrics_and_loses_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with small_disk(tmp_path / "small", "4m") as disk:
        folder = disk.folder / "run"
        logger = MetricsLogger(folder, use_tensorboard=True)
        logger.log({"a/x": 1.0}, 1)
        disk.fill()
        for step in range(2, 60):  # more than fits into what is left of the file's last block
            logger.log({"a/x": float(step), "a/text": 1 / 3}, step)
        logger.video("videos/reach", np.zeros((3, 16, 16, 3), np.uint8), 10, 59)
        errors = capsys.readouterr().err
        assert errors.count("warning: ") == 2 and errors.count("the run goes on") == 2, errors
        disk.make_room()
        logger.log({"a/x": 60.0}, 60)
        logger.close()
        assert "Traceback" not in capsys.readouterr().err
        assert [step for step, _ in logged(folder)] == list(range(1, 61))
        assert shown(folder, "a/x") == [(step, float(step)) for step in range(1, 61)]


@needs_root
def test_a_disk_full_from_the_start(tmp_path: Path) -> None:
    with small_disk(tmp_path / "small", "4m") as disk:
        folder = disk.folder / "run"
        folder.mkdir()
        disk.fill()
        logger = MetricsLogger(folder, use_tensorboard=True, layout={"learns?": {"success": ["rollout/s"]}})
        logger.describe([Settings(seed=3)])
        logger.log({"a/x": 1.0}, 1)
        disk.make_room()
        logger.log({"a/x": 2.0}, 2)
        logger.close()
        assert logged(folder) == [(1, ["a/x"]), (2, ["a/x"])] and shown(folder, "a/x") == [(1, 1.0), (2, 2.0)]


def test_other_ranks_write_nothing(tmp_path: Path) -> None:
    logger = MetricsLogger(None, use_tensorboard=True)
    logger.log({"a": 1.0}, 1)
    logger.close()
    assert read_metrics(tmp_path) == []


def test_missing_tensorboard_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(MissingExtraError, match=r"rlvla\[all\]"):
        MetricsLogger(tmp_path, use_tensorboard=True)


def test_tensorboard_holds_configuration_layout_and_videos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    logger = MetricsLogger(tmp_path, use_tensorboard=True, layout={"learns?": {"success": ["rollout/s", "eval/s"]}})
    monkeypatch.setattr(sys, "argv", ["train.py", "--local_rank=1", "--seed", "3", "--note", "a b"])
    logger.describe([Settings(seed=3, clip=0.3), Networks()])
    logger.video("videos/reach/failure_state7", np.zeros((3, 16, 16, 3), np.uint8), 10, 5)
    logger.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"), size_guidance={"tensors": 0}).Reload()

    def text(tag: str) -> str:
        return events.Tensors(tag)[0].tensor_proto.string_val[0].decode()

    assert text("configuration/text_summary").split("\n")[0] == "    gamma: 0.99"
    assert text("command/text_summary") == "    python train.py \\\n      --seed 3 \\\n      --note 'a b'"
    layout = events.Tensors("custom_scalars__config__")[0].tensor_proto.string_val[0]
    assert b"learns?" in layout and b"rollout/s" in layout and b"eval/s" in layout
    chosen = events.summary_metadata["_hparams_/session_start_info"].plugin_data.content
    assert b"seed" in chosen and b"success:1.0" in chosen and b"gamma" in chosen
    page = HParamsPluginData.FromString(events.summary_metadata["_hparams_/experiment"].plugin_data.content).experiment
    backend_context._sort_and_reduce_to_hparams_limit(page)
    # The first five are shown unless asked for more: algorithm and seed, what is not default; the others are there.
    assert [info.name for info in page.hparam_infos] == ["clip", "reward", "seed", "fast", "gamma"]
    assert b"false" in chosen
    assert [info.name.tag for info in page.metric_infos] == ["eval/success_at_end"]
    (image,) = events.Images("videos/reach/failure_state7")
    assert image.step == 5 and image.encoded_image_string.startswith(b"GIF89a")


def test_wandb_gets_the_same_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple] = []
    runs: list[tuple] = []
    config = SimpleNamespace(update=lambda values, **kw: calls.append(("config", values["seed"])))
    run = SimpleNamespace(
        config=config,
        log=lambda m: calls.append(("log", m)),
        finish=lambda: calls.append(("finish",)),
        define_metric=lambda name, step_metric=None: None,
    )
    settings: list[dict] = []
    stand_in = SimpleNamespace(
        init=lambda **kw: runs.append((kw["id"], kw["resume"])) or calls.append(("init", kw["name"])) or run,
        Settings=lambda **kw: settings.append(kw),
    )
    monkeypatch.setitem(sys.modules, "wandb", stand_in)
    folder = tmp_path / "my_run"
    logger = MetricsLogger(folder, use_tensorboard=False, use_wandb=True)
    logger.describe([Settings(seed=3)])
    logger.log({"rollout/success_at_end": 0.5}, 4)
    logger.close()
    logged = {"rollout/success_at_end": 0.5, "step": 4}
    assert calls == [("init", "my_run"), ("config", 3), ("log", logged), ("finish",)]
    assert read_metrics(folder)[0]["rollout/success_at_end"] == 0.5
    monkeypatch.setattr(logging, "_quiet", True)
    MetricsLogger(folder, use_tensorboard=False, use_wandb=True).close()
    assert settings == [{"quiet": True, "silent": False}, {"quiet": True, "silent": True}]
    MetricsLogger(tmp_path / "other", use_tensorboard=False, use_wandb=True).close()
    (first, _), again, (other, _) = runs
    assert again == (first, "allow") and first and other != first
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(MissingExtraError, match=r"rlvla\[wandb\]"):
        MetricsLogger(tmp_path, use_tensorboard=False, use_wandb=True)


class WandbServer:
    """Runs by id, as wandb keeps them: its own step only grows, also over processes, and earlier ones are dropped."""

    def __init__(self) -> None:
        self.rows: dict[str, list[dict]] = {}

    def Settings(self, **_: object) -> None: ...

    def init(self, *, id: str, **_: object) -> SimpleNamespace:
        rows = self.rows.setdefault(id, [])
        begun = len(rows)

        def log(metrics: dict, step: int | None = None) -> None:
            step = len(rows) if step is None else step
            if step >= begun and step >= len(rows) - 1:
                rows.extend({} for _ in range(len(rows), step + 1))
                rows[step] |= metrics

        return SimpleNamespace(
            config=SimpleNamespace(update=lambda *_, **__: None),
            log=log,
            define_metric=lambda name, step_metric=None: None,
            finish=lambda: None,
        )

    def points(self, name: str) -> list[tuple[int, float]]:
        (rows,) = self.rows.values()
        return [(row.get("step", at), row[name]) for at, row in enumerate(rows) if name in row]


@pytest.mark.parametrize("from_the_start", [True, False])
def test_a_resumed_run_loses_and_doubles_nothing_at_wandb(
    from_the_start: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ended before the evaluation of iteration 4, and goes on from the checkpoint of iteration 2."""
    server = WandbServer()
    monkeypatch.setitem(sys.modules, "wandb", server)
    logger = MetricsLogger(tmp_path, use_tensorboard=False, use_wandb=from_the_start)
    logger.log({"eval/success_at_end": 0.1}, 0)
    for step in (1, 2, 3, 4):
        logger.log({"rollout/success_at_end": step / 10}, step)
        if step == 2:
            logger.log({"eval/success_at_end": 0.2}, step)
    again = MetricsLogger(tmp_path, use_tensorboard=False, use_wandb=True)
    again.rewind(2, evaluates_again=False)
    for step in (3, 4, 5):
        again.log({"rollout/success_at_end": step / 10}, step)
        if step == 4:
            again.log({"eval/success_at_end": 0.4}, step)
    assert server.points("rollout/success_at_end") == [(step, step / 10) for step in (1, 2, 3, 4, 5)]
    assert server.points("eval/success_at_end") == [(0, 0.1), (2, 0.2), (4, 0.4)]


def test_details_and_counters_without_a_count_are_apart_in_tensorboard(tmp_path: Path) -> None:
    logger = MetricsLogger(tmp_path, use_tensorboard=True)
    for step in (1, 2, 3):
        logger.log({"global_seqlen/max": 6.0, "rollout/dropped": float(step > 1), "rollout/env_retries": 0.0}, step)
    logger.close()
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    steps = {tag: [event.step for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    assert steps == {
        "debug/global_seqlen/max": [1, 2, 3],
        "debug/rollout/env_retries": [1, 2, 3],
        "debug/rollout/dropped": [1],
        "rollout/dropped": [2, 3],
    }
    assert set(read_metrics(tmp_path)[0]) >= {"global_seqlen/max", "rollout/dropped"}, "names in files are the same"


def test_project_group_and_name_at_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple] = []
    run = SimpleNamespace(config=None, finish=lambda: None, define_metric=lambda name, step_metric=None: None)

    def init(**given):
        seen.append((given["project"], given.get("group"), given["name"]))
        return run

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init, Settings=lambda **_: None))
    for config in (
        LoggingConfig(use_wandb=True),
        LoggingConfig(use_wandb=True, wandb_project="arm", wandb_group="lift", wandb_name="third"),
    ):
        MetricsLogger(tmp_path / "run", use_tensorboard=False, use_wandb=True, wandb_run=config.wandb_run).close()
    assert seen == [("rlvla", None, "run"), ("arm", "lift", "third")]
