"""Demonstrations played by trained policies: what is recorded, in which environment, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from cli.collect_demos import main
from cli.convert_demos import main as convert
from cli.train_sac_vla import main as train
from rlvla.checkpoints.policy_folder import PolicyRecord, write_policy
from rlvla.commands.demos.config import CollectConfig
from rlvla.commands.demos.players import checked_player, policy_player
from rlvla.data.demonstrations import Demonstrations
from rlvla.data.reading import read_demonstrations, read_several
from rlvla.data.replayed_episodes import play_again, recorded_env, repetitions
from rlvla.data.reward_model_rows import read_outcomes
from rlvla.data.rows import DemonstrationRows
from rlvla.envs import registry
from rlvla.envs.base import TaskSpec
from rlvla.envs.config import EnvConfig, SplitConfig
from rlvla.envs.experts import ExpertConfig, make_expert
from rlvla.envs.experts.episode import play_actions
from rlvla.envs.registry import make_env
from rlvla.envs.suite_flags import suite_flags
from rlvla.envs.workers.config import WorkerConfig
from rlvla.envs.workers.pool import EnvPool
from rlvla.models.config import PolicyConfig
from rlvla.models.families import check_checkpoint
from rlvla.models.soft_actor import family
from rlvla.models.soft_actor.config import SoftActorConfig
from rlvla.models.soft_actor.policy import SoftActorPolicy
from rlvla.rollout import EpisodeRequest, RolloutEngine
from rlvla.trainer.observers import RolloutDumps
from rlvla.utils.errors import ConfigError
from tests.support.robosuite_primitives import LiftPolicy, soft_actor_of_primitives
from tests.support.robosuite_reference import require_simulator


def test_primitives_become_ordinary_demonstrations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    require_simulator()
    soft_actor_of_primitives(tmp_path / "policy")
    monkeypatch.setattr(family, "SoftActorPolicy", LiftPolicy)
    flags = ["--policy", str(tmp_path / "policy"), "--num_demos", "3", "--num_envs", "1", "--seed", "4"]
    main([*flags, "--cameras", "wrist", "--image_size", "16", "--output", str(tmp_path / "demos")])
    demos = read_demonstrations(tmp_path / "demos" / "demos.hdf5")
    assert demos.success == [True] * 3 and demos.decision_steps is None and demos.proprio is not None
    env = recorded_env(demos)
    assert env.options.get("action_space") is None and env.options.get("object_state") is None
    assert env.options["control_freq"] == 10.0 and env.max_steps == 150 and env.task_ids == (0,)
    statistics = json.loads((tmp_path / "demos" / "dataset_statistics.json").read_text())["robosuite"]
    assert statistics["action"]["mask"] == [True] * 6 + [False], "the gripper is not normalised"
    for played in play_again("demos", demos, range(3)):
        images, proprio = demos.images[played.index], demos.proprio[played.index]
        assert proprio.shape == (len(images), 6) and images.shape[1:] == (1, 16, 16, 3)
        np.testing.assert_array_equal(images, [seen.images for seen in played.observations[:-1]])
        np.testing.assert_array_equal(proprio, [seen.proprio for seen in played.observations[:-1]])


def test_dumped_primitives_play_again(tmp_path: Path) -> None:
    require_simulator()
    env = soft_actor_of_primitives(tmp_path / "policy")
    policy = check_checkpoint(tmp_path / "policy").load_policy()
    requests = [EpisodeRequest("robosuite", 0, state, 7, str(state)) for state in range(2)]
    env = replace(env, image_size=16, max_steps=40)
    with EnvPool(1) as pool:
        engine = RolloutEngine(pool, env.env_kwargs(), {"success": 1.0}, tasks=env.tasks(), keep_observed=True)
        samples = engine.run(requests, policy, temperature=1.0)
    RolloutDumps(tmp_path, 0, env, policy).after_rollout(SimpleNamespace(samples=samples, iteration=0), {})
    demos = read_demonstrations(tmp_path / "iteration_000001_rank0" / "demos.hdf5")
    assert demos.unnormalized_dims == [6], "the gripper"
    assert recorded_env(demos).options["object_state"] is True, "the observations are those of the policy"
    for played, sample in zip(play_again("dump", demos, range(2)), samples):
        starts = demos.decision_steps[played.index]
        assert len(starts) == sample.num_decisions > 1
        seen = [played.observations[step].proprio for step in starts]
        np.testing.assert_array_equal(demos.proprio[played.index], seen)
        assert len(demos.actions[played.index]) == sample.finish_step == len(played.results)


def test_the_environment_of_the_file_is_not_quite_that_of_the_policy(tmp_path: Path) -> None:
    env = soft_actor_of_primitives(tmp_path / "policy")
    config = CollectConfig(policy=str(tmp_path / "policy"))
    player = policy_player(PolicyConfig(), EnvConfig(image_size=32, max_steps=70), config, SplitConfig())
    assert player.setting.env.options == env.options and player.setting.env.image_size is None
    assert player.env.options["control_freq"] == 10.0 and player.env.options.get("object_state") is None
    assert (player.env.image_size, player.env.max_steps, player.setting.env.max_steps) == (32, 70, 70)
    assert player.env.tasks()[0].primitives == () and player.setting.tasks[0].primitives
    assert player.setting.options(watched=False)["cameras"] == (), "nobody looks"
    asked = EnvConfig(options={"object_state": True}, use_proprio=True)
    assert policy_player(PolicyConfig(), asked, config, SplitConfig()).env.tasks()[0].proprio_dim == 16


def recorded(policy: Path, output: Path, *flags: str) -> Demonstrations:
    common = ["--policy", str(policy), "--keep", "all", "--num_demos", "3", "--max_steps", "8"]
    main([*common, "--output", str(output), *flags])
    return read_demonstrations(output / "demos.hdf5")


def test_a_vla_plays_in_its_environment_and_is_recorded_in_another(policy_folder: Path, tmp_path: Path) -> None:
    plain = recorded(policy_folder, tmp_path / "plain", "--num_envs", "2")
    small = recorded(policy_folder, tmp_path / "small", "--num_envs", "1", "--image_size", "16", "--no-use_proprio")
    sampled = recorded(policy_folder, tmp_path / "sampled", "--temperature", "1.0")
    assert plain.images[0].shape[1:] == (1, 64, 64, 3) and plain.proprio is not None
    assert small.images[0].shape[1:] == (1, 16, 16, 3) and small.proprio is None
    assert plain.init_states == small.init_states == sampled.init_states
    for one, other, drawn in zip(plain.actions, small.actions, sampled.actions):
        np.testing.assert_allclose(one, other, atol=1e-5)
        assert one.shape != drawn.shape or np.abs(one - drawn).max() > 1e-3
    assert len(list(play_again("plain", plain, range(3)))) == 3


def corrected(policy: Path, output: Path, *flags: str) -> Demonstrations:
    """Three greedy episodes of up to eight steps, which the expert takes over."""
    return recorded(policy, output, "--corrections", "--num_envs", "1", *flags)


def test_the_expert_takes_over_from_the_policy(policy_folder: Path, tmp_path: Path) -> None:
    """Before the takeover the actions of the policy, which are no training rows; then those of the expert."""
    plain = recorded(policy_folder, tmp_path / "plain", "--num_envs", "1")
    demos = corrected(policy_folder, tmp_path / "corrections", "--seed", "0")
    assert demos.has_corrections and not plain.has_corrections and demos.init_states == plain.init_states
    own = [np.abs(a[:n] - b[:n]).sum(1) for a, b in zip(demos.actions, plain.actions) if (n := min(len(a), len(b)))]
    for distances, steps, actions, images in zip(own, demos.decision_steps, demos.actions, demos.images):
        assert steps.tolist() == list(range(steps[0], len(actions))) and len(images) == len(steps)
        assert (distances[: steps[0]] < 1e-5).all() and distances[steps[0]] > 1e-3
    assert len({steps[0] for steps in demos.decision_steps}) > 1, "takeovers at different steps"
    env = make_env("toy_reach", 0, **recorded_env(demos).env_kwargs())
    expert = make_expert("toy_reach", 0, ExpertConfig())
    for played in play_again("corrections", demos, range(3)):
        steps = demos.decision_steps[played.index]
        seen = [played.observations[step].images for step in steps]
        np.testing.assert_array_equal(demos.images[played.index], seen)
        env.reset(played.init_state_id, played.seed)
        for action in demos.actions[played.index][: steps[0]]:
            env.step_chunk(action[None])
        expert.reset(np.random.default_rng([9176, played.init_state_id, played.seed]))
        np.testing.assert_allclose(demos.actions[played.index][steps[0]], expert.act(env.privileged_state()), atol=1e-6)
    again = corrected(policy_folder, tmp_path / "again", "--seed", "0", "--num_envs", "2")
    assert all(np.array_equal(a, b) for a, b in zip(again.actions, demos.actions)), "for any number of workers"


def test_corrections_among_demonstrations(policy_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Only the expert's steps become rows; what needs whole episodes refuses them."""
    corrections, plain = tmp_path / "corrections", tmp_path / "plain"
    demos, whole = corrected(policy_folder, corrections), recorded(policy_folder, plain)
    both = read_several([str(plain), str(corrections)])
    policy = check_checkpoint(policy_folder).load_policy()
    rows = DemonstrationRows(both, policy)
    assert len(rows) == whole.num_steps + sum(len(a) - s[0] for a, s in zip(demos.actions, demos.decision_steps))
    assert all(not repetition.turned and repetition.distance == 0 for repetition in repetitions("", demos, range(3)))
    with pytest.raises(ConfigError, match="no whole episodes"):
        read_outcomes([str(corrections / "demos.hdf5")])
    with pytest.raises(SystemExit):
        convert(["--demos", str(corrections), "--output", str(tmp_path / "steps"), "--render_steps"])
    assert "the steps of the policy would become training rows" in capsys.readouterr().err
    convert(["--demos", str(corrections), "--output", str(tmp_path / "lerobot")])
    again = read_demonstrations(tmp_path / "lerobot")
    assert [steps.tolist() for steps in again.decision_steps] == [steps.tolist() for steps in demos.decision_steps]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--task_suite_name", "toy_reach", "--corrections"], "--corrections: there is no --policy"),
        (["--policy", "{policy}", "--corrections", "--offset_prob", "0.1"], "--offset_prob"),
        (["--task_suite_name", "toy_reach", "--intervene", "expert"], "--intervene expert: there is no --policy"),
        (["--policy", "{policy}", "--intervene", "expert", "--corrections"], "with --intervene, leave it out"),
        (["--policy", "{policy}", "--intervene_patience", "3"], "it belongs to --intervene expert"),
        (["--policy", "{policy}", "--intervene_reserve", "3", "--offset_prob", "0.1"], "--offset_prob"),
    ],
)
def test_flags_of_corrections_that_nothing_reads(
    flags: list[str], words: str, policy_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    flags = [flag.format(policy=policy_folder) for flag in flags]
    with pytest.raises(SystemExit):
        main([*flags, "--output", str(tmp_path / "demos")])
    assert words in capsys.readouterr().err and not (tmp_path / "demos").exists()


def test_a_person_corrects_a_policy_on_the_page(policy_folder: Path, tmp_path: Path, capsys) -> None:
    """The second of two episodes is untouched: it is the one that the policy records by itself."""
    pytest.importorskip("websockets")
    from tests.support.teleoperation import open_socket, person, send, state_where

    plain = recorded(policy_folder, tmp_path / "plain", "--num_envs", "1")

    def play(address: str) -> None:
        with open_socket(address) as page:
            for kept, held in enumerate([{"d": 1}, {}], 1):
                state_where(page, phase="playing", step=0)
                send(page, "controls", held=held)
                send(page, "play")
                if held:
                    state_where(page, step=2)
                    send(page, "controls", held={})
                state_where(page, phase="ended")
                send(page, "keep")
                state_where(page, kept=kept)
            send(page, "finish")
            state_where(page, message="finished: the page can be closed")

    output = tmp_path / "corrections"
    with person(capsys, play):
        main(
            ["--policy", str(policy_folder), "--intervene", "page", "--port", "0", "--keep", "all", "--seed", "0"]
            + ["--max_steps", "8", "--output", str(output)]
        )
    demos = read_demonstrations(output / "demos.hdf5")
    flags = demos.interventions
    assert flags[0][:2].all() and not flags[0][-1] and not flags[1].any()
    assert (demos.actions[0][flags[0]] == [0.5, 0]).all(), "half of the speed"
    np.testing.assert_allclose(demos.actions[1], plain.actions[1], atol=1e-5)
    assert demos.init_states == plain.init_states[:2] and demos.images[1].shape == plain.images[1].shape
    out = " ".join(capsys.readouterr().out.split())
    share = np.concatenate(flags).mean()
    assert "2 of 3 episodes" in out and f"{share:.0%} of the steps of the kept episodes are yours; 0 succeeded" in out
    assert f"--demos {output / 'demos.hdf5'} --pretrain {policy_folder}" in out


def test_success_is_what_the_policy_is_asked_for(policy_folder: Path, tmp_path: Path, capsys) -> None:
    few = ["--keep", "success", "--train_init_states", "0", "3", "--max_steps", "1"]
    with pytest.raises(SystemExit):
        recorded(policy_folder, tmp_path / "none", *few)
    told = " ".join(capsys.readouterr().err.split())
    assert "the policy succeeded in 0 of" in told and "train it for longer" in told
    assert not list((tmp_path / "none").glob("*")), "nothing is left"


def test_what_does_not_go_with_the_page_is_refused(policy_folder: Path, tmp_path: Path, capsys) -> None:
    pytest.importorskip("websockets")

    def refused(*flags: str) -> str:
        with pytest.raises(SystemExit):
            main([*flags, "--output", str(tmp_path / "demos")])
        assert not (tmp_path / "demos").exists()
        return " ".join(capsys.readouterr().err.split())

    page, of_policy = ["--intervene", "page"], ["--policy", str(policy_folder)]
    text = refused(*page, "--task_suite_name", "toy_reach")
    assert "--intervene page: there is no --policy" in text
    assert "--port 9: there is no --intervene page" in refused(*of_policy, "--port", "9")
    flags = ["--corrections", "--num_envs", "4", "--max_minutes", "1", "--task_demos", "reach:3", "--keys", "0:o/p"]
    text = refused(*of_policy, *page, *flags, "--image_size", "32", "--no-use_proprio", "--gripper_start", "1")
    assert "--corrections: the expert takes over once" in text
    for flag in ("--num_envs 4", "--max_minutes 1.0", "--task_demos reach:3"):
        assert f"{flag}: with --intervene page a person chooses and ends the episodes" in text
    assert "--keys 0:o/p: p is a function of the page already" in text
    for asked, trained in (("--image_size 32", "--image_size 64"), ("--no-use_proprio", "--use_proprio")):
        assert f"{asked}: with --intervene page the policy acts on the recorded observations" in text
        assert f"it was trained with {trained}" in text
    assert "--noise_std 0.1: --policy plays" in refused(*of_policy, *page, "--noise_std", "0.1")
    soft_actor_of_primitives(tmp_path / "primitives")
    assert "--policy plays primitives" in refused(*page, "--policy", str(tmp_path / "primitives"))
    env = EnvConfig(task_suite_name="toy_reach", use_proprio=True, options={"object_state": True})
    config = SoftActorConfig(action_dim=2, action_chunk_len=2, proprio_dim=4, hidden_sizes=(8,))
    assert write_policy(SoftActorPolicy(config), tmp_path / "state", PolicyRecord(env, ())) is None
    text = refused(*page, "--policy", str(tmp_path / "state"))
    assert "reads privileged state, which is recorded with --object_state only; give --object_state" in text
    recording = CollectConfig(policy=str(tmp_path / "state"), intervene="page", output=str(tmp_path / "demos"))
    asked = EnvConfig(image_size=128, options={"object_state": True})
    player = checked_player(asked, recording, SplitConfig(), WorkerConfig(), PolicyConfig(), ExpertConfig)
    assert player.env.image_size == 128 and player.env.options["object_state"], "a policy without images takes any"


REFUSED = {
    "suite": (["--task_suite_name", "toy_reach"], "was trained in robosuite, not in --task_suite_name toy_reach"),
    "task": (["--task_ids", "0", "3"], "was trained on 0 (Lift), and --task_ids names 3"),
    "expert": (["--noise_std", "0.1"], "--noise_std 0.1: --policy plays, not the scripted expert"),
    "actions": (["--action_space", "primitives"], "--action_space: the actions are those of --policy"),
    "states": (["--train_init_states", "0", "2"], "--num_demos 3: greedy actions are the same"),
    "states of a task": (
        ["--train_init_states", "0", "3", "--task_demos", "Lift:4"],
        "--task_demos Lift:4: greedy actions are the same",
    ),
    "cameras": (["--cameras", "nose"], "unknown camera(s) nose"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_the_policy_is_refused(case: str, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    soft_actor_of_primitives(tmp_path / "policy")
    flags, words = REFUSED[case]
    with pytest.raises(SystemExit):
        main(["--policy", str(tmp_path / "policy"), "--num_demos", "3", "--output", str(tmp_path / "demos"), *flags])
    assert words in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "demos").exists()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--policy", "nowhere"], "--policy nowhere: there is no folder nowhere in "),
        (["--temperature", "0.5"], "--temperature 0.5: there is no --policy"),
        (["--unnorm_key", "x"], "--unnorm_key x: there is no --policy"),
    ],
)
def test_a_policy_that_is_not_there(flags: list[str], words: str, tmp_path: Path, capsys) -> None:
    with pytest.raises(SystemExit):
        main(["--task_suite_name", "toy_reach", "--output", str(tmp_path / "demos"), *flags])
    assert words in " ".join(capsys.readouterr().err.split())


def test_primitives_that_do_not_tell_what_they_consist_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    silent = TaskSpec("mute", 0, "mute", "go", 10, 5, 3, 2, 10.0, primitives=(("go", 2),), macro_steps=4)
    suite_flags()  # imports the suites that ship with rlvla; what the test registers goes with it
    monkeypatch.setattr(registry, "_SUITES", dict(registry._SUITES))
    reach = replace(registry.get_suite("toy_reach"), list_tasks=lambda **kw: [silent], options=None)
    registry.register_suite("mute", reach)
    flags = ["--task_suite_name", "mute", "--policy", "primitives", "--eval_init_states", "4", "5"]
    flags += ["--train_init_states", "0", "3", "--eval_episodes", "1", "--save_path", str(tmp_path / "run")]
    with pytest.raises(SystemExit):
        train([*flags, "--dump_rollouts"])
    told = " ".join(capsys.readouterr().err.split())
    assert "--dump_rollouts: the primitives of mute (mute) do not report the actions of their steps" in told


@pytest.mark.parametrize(("change", "message"), [(-1, "replay continues"), (+1, "ends after 4")])
def test_actions_of_another_episode_are_noticed(change: int, message: str) -> None:
    env = make_env("toy_reach", 0, image_size=16, max_steps=4)
    assert len(play_actions(env, np.zeros((4, 2), np.float32), 0, 0)["actions"]) == 4
    with pytest.raises(RuntimeError, match=message):
        play_actions(env, np.zeros((4 + change, 2), np.float32), 0, 0)
