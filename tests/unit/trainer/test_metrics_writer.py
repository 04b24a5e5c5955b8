"""Where metrics go: a file always, TensorBoard and Weights & Biases on request."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams import backend_context
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

from rlvla.trainer.metrics_writer import MetricsLogger
from rlvla.utils import terminal as logging
from rlvla.utils.errors import MissingExtraError
from rlvla.utils.files import read_metrics


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
        config=config, log=lambda m, step: calls.append(("log", m, step)), finish=lambda: calls.append(("finish",))
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
    assert calls == [("init", "my_run"), ("config", 3), ("log", {"rollout/success_at_end": 0.5}, 4), ("finish",)]
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
