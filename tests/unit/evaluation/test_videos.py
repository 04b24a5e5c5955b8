"""Which evaluation episodes are recorded, under which names, and that they are the evaluated ones."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from rlvla.envs import list_tasks
from rlvla.envs.config import SplitConfig
from rlvla.envs.workers.pool import EnvPool, EnvWorkerError
from rlvla.evaluation.evaluate import evaluate
from rlvla.evaluation.results import EpisodeOutcome, summarize
from rlvla.evaluation.videos import (
    captioned,
    choose_episodes,
    machine_states,
    machines_of_run,
    primitive_names,
    record_videos,
    recorded_name,
    recorded_state,
)
from rlvla.models.actor import Actor
from rlvla.rewards import RewardConfig
from rlvla.rewards.machine_source import MachineSource
from rlvla.rollout import RolloutEngine, TooManyDroppedError
from rlvla.rollout.stats import DroppedEpisode
from rlvla.utils.deepspeed.config import StrategyConfig
from rlvla.utils.deepspeed.strategy import DeepspeedStrategy
from rlvla.utils.video import read_video

TOY = list_tasks("toy_reach")[0]
TASKS = [TOY, replace(TOY, task_id=1, name="other")]


def chosen(successes: str, count: int) -> list[tuple[int, int, bool]]:
    """Two tasks with the same outcomes, `1` for success."""
    outcomes = [EpisodeOutcome(t, i, s == "1", True, 5) for t in (0, 1) for i, s in enumerate(successes)]
    episodes = choose_episodes(summarize(outcomes, TASKS, "heldout", True), count)
    return [(e.task_id, e.init_state_id, e.success_at_end) for e in episodes]


def test_failures_are_always_among_them() -> None:
    assert chosen("1101", 3) == [(0, 2, False), (1, 2, False), (0, 0, True)]
    assert chosen("1101", 1) == [(0, 2, False)]
    assert chosen("1111", 3) == [(0, 0, True), (1, 0, True), (0, 1, True)]
    assert chosen("0001", 6) == [(t, i, False) for i in (0, 1) for t in (0, 1)] + [(0, 3, True), (1, 3, True)]
    assert len(chosen("01", 99)) == 4 and chosen("01", 0) == []


def test_preferred_states_come_first_in_either_half() -> None:
    outcomes = [EpisodeOutcome(0, i, i % 2 == 0, True, 5) for i in range(8)]
    result = summarize(outcomes, [TOY], "heldout", True)
    taken = choose_episodes(result, 4, preferred={("reach", 4), ("reach", 7), ("other", 1)})
    assert [e.init_state_id for e in taken] == [7, 1, 4, 0]


def test_states_lost_and_gained_against_a_baseline_come_first() -> None:
    """Half of the videos of a policy that solves all but one state would show what both solve."""
    own = [EpisodeOutcome(0, i, i != 5, True, 5) for i in range(8)]
    base = [EpisodeOutcome(0, i, i not in (2, 3), True, 5) for i in range(8)]
    result, baseline = (summarize(outcomes, [TOY], "heldout", True) for outcomes in (own, base))
    taken = choose_episodes(result, 4, baselines=[baseline])
    assert [e.init_state_id for e in taken] == [5, 2, 3, 0], "lost and gained in turn, then what both solve"
    filmed = choose_episodes(result, 2, preferred={("reach", 3), ("reach", 0)}, baselines=[baseline])
    assert [e.init_state_id for e in filmed] == [5, 3]


def test_file_names_tell_the_state() -> None:
    assert recorded_state(Path("a/pick_it_state12_success.mp4")) == ("pick_it", 12)
    assert recorded_state(Path("a/x_state1_y_state2_failure.mp4")) == ("x_state1_y", 2)
    assert recorded_state(Path("mine.mp4")) == ("mine", -1)
    assert recorded_name("open: the drawer/top") == "open_the_drawer_top"


def too_many_dropped(requests: list, *args: object, **kw: object) -> None:
    error = EnvWorkerError("broken", worker_id=0, phase="step_chunk")
    raise TooManyDroppedError([DroppedEpisode(requests[0], error)], len(requests), 0.05)


def dark_scene(samples: list) -> list[dict[str, np.ndarray]]:
    return [{"above": np.zeros((s.finish_step, 128, 128, 3), np.uint8)} for s in samples]


def test_the_evaluated_episodes_are_recorded(
    policy_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("av", reason="videos need PyAV: the extra rlvla[video]")
    actor, strategy = Actor.from_pretrained(policy_folder).eval(), DeepspeedStrategy(StrategyConfig())
    kwargs = {"cameras": ("top",), "image_size": 64, "use_proprio": True}
    with EnvPool(2) as pool:
        engine = RolloutEngine(pool, kwargs, {"success": 1.0})
        options = {"split": SplitConfig(), "seed": 3, "temperature": 1.0}
        result = evaluate(engine, actor, [TOY], strategy, episodes_per_task=6, greedy=False, **options)
        del options["split"]
        more = replace(result, dropped=5000)  # of other tasks, or of this one: what there is can be played
        videos = record_videos(engine, actor, [TOY], strategy, more, tmp_path, count=3, **options)
        wanted = [(0, result.episodes[4].init_state_id), (0, 77)]
        more_options = options | {"count": 3, "states": wanted, "scene": dark_scene}
        (one,) = record_videos(engine, actor, [TOY], strategy, result, tmp_path / "scene", **more_options)
        monkeypatch.setattr(engine, "run", too_many_dropped)
        assert record_videos(engine, actor, [TOY], strategy, result, tmp_path / "no", count=3, **options) == []
    assert "some videos are missing: 1 of 3" in caplog.text
    played = {e.init_state_id: e for e in result.episodes}
    assert one.init_state_id == wanted[0][1] and len(one.frames) == played[one.init_state_id].length + 1
    assert one.frames.shape[1:3] == (346, 588), "the scene, and what the policy sees"
    assert one.frames[:, 100:200, :200].max() == 0 and one.frames[:, 100:200, -200:].max() > 100
    assert len(videos) == 3
    for video in videos:
        outcome = played[video.init_state_id]
        assert video.success == outcome.success_at_end
        word = "success" if video.success else "failure"
        assert video.path == tmp_path / f"reach_state{video.init_state_id}_{word}.mp4"
        frames = read_video(video.path)
        assert len(frames) == outcome.length + 1, "the initial state and every step"
        assert video.frames.shape == frames.shape and np.abs(frames.astype(int) - video.frames).mean() < 8


def test_captioned_frames_stand_upright() -> None:
    lower = torch.zeros(1, 1, 64, 64, 3, dtype=torch.uint8)
    lower[:, :, 32:] = 200

    def frames(images: torch.Tensor, below: bool) -> np.ndarray:
        fields = {"frames": None, "instruction": "do it", "step_events": None, "success_at_end": True}
        return captioned(SimpleNamespace(env_images=images, images_flipped_vertically=below, **fields))

    np.testing.assert_array_equal(frames(lower.flip(2), True), frames(lower, False))


def test_the_primitive_of_each_frame() -> None:
    task = replace(list_tasks("toy_reach")[0], primitives=(("reach", 3), ("open", 0), ("grasp", 1)), macro_steps=4)
    actions = torch.zeros(3, 4, 6)
    actions[:, 1:] = 9.0  # what is ignored
    actions[0, 0, 2] = actions[1, 0, 1] = 1.0
    actions[2, 0, :3] = torch.tensor([-3.0, 2.0, 3.0])  # clipped, so that the first of two chooses
    sample = SimpleNamespace(actions=actions, executed=torch.arange(4)[None] < torch.tensor([3, 1, 2])[:, None])
    names = primitive_names(sample, task)
    assert names == ["", "grasp", "grasp", "grasp", "open", "open", "open"]
    assert primitive_names(sample, list_tasks("toy_reach")[0]) is None
    shown = {"instruction": "do it", "success_at_end": True, "images_flipped_vertically": False}
    shown["step_events"] = [(frozenset(), False)] * 6
    images, frames = torch.zeros(1, 1, 64, 64, 3, dtype=torch.uint8), np.zeros((6, 64, 64, 3), np.uint8)
    recorded = SimpleNamespace(env_images=images, frames=frames, **shown)
    plain, named = captioned(recorded), captioned(recorded, primitives=names)
    assert [not np.array_equal(a, b) for a, b in zip(plain, named)] == [False] + [True] * 6


def test_machine_states_follow_the_propositions() -> None:
    class Recorded:
        init_state_id, seed = 0, 0
        step_events = [(frozenset(), False), (frozenset({"near"}), False), (frozenset({"near", "reached"}), True)]

    formula = MachineSource(RewardConfig(rm_formula="F(near & F reached)"))
    states = machine_states(Recorded(), TOY, formula)
    assert states is not None and len(states) == 4 and len(set(states)) == 3 and states[0] == states[1]
    no_machine = machine_states(
        Recorded(), replace(TOY, name="nothing", suite="elsewhere", machine=None), MachineSource(RewardConfig())
    )
    assert no_machine is None
    assert machine_states(Recorded(), TOY, None) is None, "nobody asked for a machine"
    Recorded.step_events = None
    assert machine_states(Recorded(), TOY, formula) is None


def test_the_machines_are_those_the_policy_was_trained_with(tmp_path: Path) -> None:
    policy = tmp_path / "policy"
    assert machines_of_run(policy) is None, "no run's folder"
    flags = asdict(RewardConfig(reward=("success:1", "rm:0.5"), rm_formula="F(near & F reached)"))
    (tmp_path / "run_config.json").write_text(json.dumps({"rewards": flags}))
    machines = machines_of_run(policy)
    assert machines is not None and machines.graph(TOY).states == MachineSource(RewardConfig(**flags)).graph(TOY).states
    for content in ({"rewards": flags | {"reward": ["success:1"]}}, {"rewards": {"reward": ["rm:1"]}}, {}, []):
        (tmp_path / "run_config.json").write_text(json.dumps(content))
        assert machines_of_run(policy) is None
