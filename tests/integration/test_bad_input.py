"""Bad input: exit status 2, one line per problem, all problems at once, and nothing started or written."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from cli import check_env, collect_demos, eval_vla, train_ppo_vla, train_rm_vla, train_sft_vla
from rlvla.checkpoints.policy_folder import PolicyRecord
from rlvla.envs.config import EnvConfig
from rlvla.envs.workers.pool import EnvPool
from rlvla.models.vla.tiny import build_tiny
from rlvla.utils.cli import command
from rlvla.utils.cli.flags import fail
from rlvla.utils.deepspeed.strategy import DeepspeedStrategy
from rlvla.utils.errors import ConfigError, Problem

PPO, SFT, EVAL, COLLECT = train_ppo_vla.main, train_sft_vla.main, eval_vla.main, collect_demos.main
CHECK_ENV, REWARD_MODEL = check_env.main, train_rm_vla.main
Refused = Callable[..., list[Problem]]


def worker_processes() -> set[int]:
    """Environment workers among this process's children, zombies left out."""
    found = set()
    for task in Path("/proc/self/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # a thread that ended meanwhile
            for pid in (task / "children").read_text().split():
                with suppress(FileNotFoundError, ProcessLookupError):
                    if b"rlvla.envs.workers.worker" in Path(f"/proc/{pid}/cmdline").read_bytes():
                        found.add(int(pid))
    return found


@pytest.fixture
def starts_allowed() -> bool:
    """Overridden by tests whose problem shows only in a worker."""
    return False


@pytest.fixture
def refused(
    tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch, starts_allowed: bool
) -> Refused:
    """Runs a command that must be refused in an empty folder, and returns its problems, as they stand on the screen."""

    def not_now(*_: object, **__: object) -> None:
        raise AssertionError("something was started before the configuration was refused")

    if not starts_allowed:
        monkeypatch.setattr(EnvPool, "__init__", not_now)
    monkeypatch.setattr(DeepspeedStrategy, "__init__", not_now)
    workers = worker_processes()
    folder = tmp_path / "cwd"
    folder.mkdir()
    monkeypatch.chdir(folder)  # default output folders are relative

    def run(main: Callable, *argv: object) -> list[Problem]:
        before, refusals = set(tmp_path.rglob("*")), []

        def remember(prog: str, error: ConfigError) -> None:
            refusals.append(error)
            fail(prog, error)

        monkeypatch.setattr(command, "fail", remember)
        with pytest.raises(SystemExit) as stop:
            main([str(word) for word in argv])
        assert stop.value.code == 2
        out, err = capsys.readouterr()
        assert "Traceback" not in out + err
        assert set(tmp_path.rglob("*")) == before, "something was written"
        assert worker_processes() == workers
        title, *lines = err.strip().splitlines()
        if "the configuration cannot be used" not in title:  # argparse's own: a single sentence
            return [Problem(None, "", line) for line in (title, *lines)]
        assert all(line.startswith("  - ") for line in lines), err
        assert len(set(lines)) == len(lines), "a problem is reported twice"
        (refusal,) = refusals
        shown = "\n".join(lines)
        if not isinstance(refusal, ConfigError):  # an extra that is not installed
            return [Problem(None, "", line.removeprefix("  - ")) for line in lines]
        assert shown == "\n".join(f"  - {problem}" for problem in refusal.problems)
        return refusal.problems

    return run


def the_only(problems: list[Problem], *words: str) -> None:
    """Exactly one problem, which holds all the words."""
    assert len(problems) == 1, problems
    for word in words:
        assert word in problems[0]


def kinds(problems: list[Problem]) -> list[tuple[str | None, str]]:
    """Flag and reason of each problem."""
    return [(problem.flag, problem.reason) for problem in problems]


@pytest.fixture(scope="module")
def robosuite_policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untrained policy for robosuite Lift."""
    folder = tmp_path_factory.mktemp("robosuite") / "policy"
    zeros, ones = [0.0] * 7, [1.0] * 7
    action = {"mean": zeros, "std": ones, "min": [-1.0] * 7, "max": ones, "q01": [-1.0] * 7, "q99": ones}
    build_tiny(
        folder,
        sentences=["lift the red cube"],
        dataset_statistics={"robosuite": {"action": action}},
        vision_dim=16,
        llm_dim=32,
        llm_layers=1,
    )
    PolicyRecord(EnvConfig(task_suite_name="robosuite"), ()).write(folder)
    return folder


@pytest.fixture(scope="module")
def policy_of_shared_demos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A toy_reach policy whose demonstrations started from all initial states."""
    folder = tmp_path_factory.mktemp("shared")
    recording = ["--task_suite_name", "toy_reach", "--eval_protocol", "shared", "--num_demos", "20"]
    COLLECT([*recording, "--output", str(folder / "demos")])
    sizes = ["--tiny_vision_dim", "16", "--tiny_llm_dim", "32", "--tiny_llm_layers", "1", "--max_epochs", "1"]
    SFT([*sizes, "--demos", str(folder / "demos" / "demos.hdf5"), "--save_path", str(folder / "sft")])
    return folder / "sft" / "policy"


@pytest.fixture
def policy(policy_folder: Path, tmp_path: Path) -> Path:
    """A copy of the toy_reach policy that a test may damage."""
    return shutil.copytree(policy_folder, tmp_path / "policy")


# ------------------------------------------------------------------------------------- suite, task, camera
@pytest.mark.parametrize("main", [PPO, EVAL, COLLECT])
def test_unknown_suite(refused: Refused, policy: Path, main: Callable) -> None:
    where = [] if main is COLLECT else ["--pretrain", policy]
    the_only(refused(main, *where, "--task_suite_name", "toy_teach"), "toy_teach", "robosuite", "toy_reach")


@pytest.mark.parametrize("main", [PPO, EVAL, COLLECT])
def test_unknown_task_and_camera_are_reported_together(refused: Refused, policy: Path, main: Callable) -> None:
    where = ["--task_suite_name", "toy_reach"] if main is COLLECT else ["--pretrain", policy]
    problems = refused(main, *where, "--task_ids", 0, 7, "--cameras", "side")
    assert len(problems) == 2
    assert any("task 7" in p and "0 (reach)" in p for p in problems)
    assert any("side" in p and "known cameras: top" in p for p in problems)


def test_unknown_robosuite_camera(refused: Refused, robosuite_policy: Path) -> None:
    the_only(refused(PPO, "--pretrain", robosuite_policy, "--cameras", "top"), "top", "agentview, wrist")


def test_no_suite_at_all(refused: Refused) -> None:
    the_only(refused(COLLECT), "no task suite", "--task_suite_name")


# ------------------------------------------------------------------------------------- checkpoint folders
def lacks(name: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).unlink()


def holds(name: str, content: bytes) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes(content)


def foreign_weights(folder: Path) -> None:
    save_file({"lm_head.weight": torch.zeros(3, 3)}, folder / "model.safetensors")


DAMAGES = {
    "no config": (lacks("config.json"), "config.json is missing"),
    "no weights": (lacks("model.safetensors"), "has no weights"),
    "no tokenizer": (lacks("tokenizer.json"), "tokenizer.json is missing"),
    "no statistics": (lacks("dataset_statistics.json"), "no action statistics"),
    "another model": (holds("config.json", b'{"model_type": "llama"}'), "'llama'"),
    "config is no JSON": (holds("config.json", b"{\x00"), "config.json is not valid JSON"),
    "a pointer for weights": (holds("model.safetensors", b"version https://git-lfs"), "not a readable safetensors"),
    "weights of another model": (foreign_weights, "tensors missing"),
    "a missing shard": (
        holds("model.safetensors.index.json", b'{"weight_map": {"a": "model-1.safetensors"}}'),
        "model-1.safetensors is missing",
    ),
    "statistics are no JSON": (holds("dataset_statistics.json", b"["), "dataset_statistics.json is not valid JSON"),
    "tokenizer is no JSON": (holds("tokenizer.json", b"<html>"), "tokenizer.json"),
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("main", [PPO, EVAL, SFT])
def test_damaged_checkpoint(refused: Refused, policy: Path, demos_file: Path, main: Callable, damage: str) -> None:
    change, words = DAMAGES[damage]
    change(policy)
    demos = ["--demos", demos_file] if main is SFT else []
    problems = refused(main, "--pretrain", policy, *demos)
    assert words in "\n".join(map(str, problems))
    assert str(policy) in "\n".join(map(str, problems))
    if damage != "weights of another model":
        assert len(problems) == 1


@pytest.mark.parametrize("main", [PPO, EVAL, SFT])
def test_missing_checkpoint_folder(refused: Refused, demos_file: Path, main: Callable) -> None:
    demos = ["--demos", demos_file] if main is SFT else []
    the_only(refused(main, "--pretrain", "nowhere", *demos), "there is no folder nowhere in ")


def test_several_missing_files_are_reported_together(refused: Refused, policy: Path) -> None:
    for name in ("model.safetensors", "tokenizer.json", "dataset_statistics.json"):
        (policy / name).unlink()
    assert len(refused(EVAL, "--pretrain", policy)) == 3


def test_critic_and_reward_folders_are_checked_too(refused: Refused, policy: Path) -> None:
    problems = refused(PPO, "--pretrain", policy, "--critic_pretrain", "nowhere", "--reward_pretrain", policy)
    assert len(problems) == 2
    assert "--critic_pretrain" in problems[0] and "nowhere" in problems[0]
    assert "--reward_pretrain" in problems[1] and "not a reward model" in problems[1]


def test_weights_that_lost_a_tensor(refused: Refused, policy: Path) -> None:
    tensors = load_file(policy / "model.safetensors")
    name = sorted(tensors)[0]
    del tensors[name]
    save_file(tensors, policy / "model.safetensors")
    assert any(name in problem for problem in refused(PPO, "--pretrain", policy))


@pytest.mark.parametrize(
    ("main", "start"), [(PPO, "checkpoint"), (EVAL, "checkpoint"), (SFT, "checkpoint"), (SFT, "tiny")]
)
def test_unknown_statistics_key(refused: Refused, policy: Path, demos_file: Path, main: Callable, start: str) -> None:
    demos = ["--demos", demos_file] if main is SFT else []
    argv = ["--pretrain", policy if start == "checkpoint" else "tiny", *demos, "--unnorm_key", "bridge_orig"]
    the_only(refused(main, *argv), "bridge_orig", "toy_reach")


@pytest.mark.parametrize(
    ("flags", "flag"),
    [
        (["--action_chunk_len", 5], "action_chunk_len"),
        (["--num_images_in_input", 2], "num_images_in_input"),
        (["--no-use_proprio"], "use_proprio"),
        (["--image_size", 48], "image_size"),
    ],
)
def test_policy_and_environment_contradict_each_other(refused: Refused, policy: Path, flags: list, flag: str) -> None:
    assert kinds(refused(PPO, "--pretrain", policy, *flags)) == [(flag, "mismatch")]


def test_a_policy_of_another_robot(refused: Refused, policy: Path) -> None:
    problems = refused(PPO, "--pretrain", policy, "--task_suite_name", "robosuite", "--cameras", "wrist")
    assert kinds(problems) == [("task_suite_name", "action_dims"), ("task_suite_name", "proprio_dims")]
    assert "[7] action dimensions" in problems[0] and "6 numbers of proprioception" in problems[1]


def test_a_policy_without_primitives(refused: Refused, policy: Path) -> None:
    flags = ["--task_suite_name", "robosuite", "--cameras", "wrist", "--action_space", "primitives"]
    problems = refused(PPO, "--pretrain", policy, *flags)
    assert kinds(problems)[:2] == [("task_suite_name", "action_dims"), ("task_suite_name", "macro_steps")]
    assert "chunks of that length" in problems[1] and "40 steps" in problems[1]


def test_demonstrations_that_do_not_fit_the_checkpoint(
    refused: Refused, robosuite_policy: Path, demos_file: Path
) -> None:
    the_only(refused(SFT, "--pretrain", robosuite_policy, "--demos", demos_file), "2 action dimensions", "predicts 7")


# ------------------------------------------------------------------------------------- amounts
def test_grpo_needs_groups(refused: Refused, policy: Path) -> None:
    problems = refused(PPO, "--pretrain", policy, "--advantage_estimator", "grpo")
    assert kinds(problems) == [("advantage_estimator", "too_few")]


@pytest.mark.parametrize(
    ("world", "flags", "expected"),
    [
        (1, [10, "--train_batch_size", 4], [("train_batch_size", "does_not_divide")]),
        (
            2,
            [33, "--train_batch_size", 11],
            [(f"{which}_batch_size", "not_divisible") for which in ("rollout", "train")],
        ),
        (2, [66, "--train_batch_size", 33], [("train_batch_size", "not_divisible")]),
    ],
)
def test_batch_sizes_that_do_not_divide(
    refused: Refused, policy: Path, monkeypatch: pytest.MonkeyPatch, world: int, flags: list, expected: list
) -> None:
    monkeypatch.setenv("WORLD_SIZE", str(world))
    problems = refused(PPO, "--pretrain", policy, "--num_episodes", 660, "--rollout_batch_size", *flags)
    assert kinds(problems) == expected


@pytest.mark.parametrize(("world", "words"), [(1, "; give 40 or 50"), (2, "; give 40 or 50"), (3, "")])
def test_batch_sizes_that_fit_are_named(
    refused: Refused, policy: Path, monkeypatch: pytest.MonkeyPatch, world: int, words: str
) -> None:
    """The nearest divisors of 200 that the ranks can share out; three cannot share out any."""
    monkeypatch.setenv("WORLD_SIZE", str(world))
    problems = refused(
        PPO, "--pretrain", policy, "--num_episodes", 600, "--rollout_batch_size", 200, "--train_batch_size", 48
    )
    (found,) = [problem for problem in problems if problem.reason == "does_not_divide"]
    assert str(found).endswith(f"= 200{words}")


@pytest.mark.parametrize(
    ("episodes", "reason", "words"), [(10, "too_few", "iteration of 64"), (200, "not_divisible", "192 or 256")]
)
def test_episodes_that_make_no_whole_iterations(
    refused: Refused, policy: Path, episodes: int, reason: str, words: str
) -> None:
    problems = refused(PPO, "--pretrain", policy, "--num_episodes", episodes)
    assert kinds(problems) == [("num_episodes", reason)]
    the_only(problems, f"--num_episodes {episodes}", words)


def test_sft_batch_over_ranks(refused: Refused, demos_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "3")
    the_only(refused(SFT, "--demos", demos_file, "--train_batch_size", 64), "--train_batch_size 64", "ranks 3")


def test_more_ranks_than_rows(refused: Refused, demos_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "1000000")
    flags = ["--demos", demos_file, "--train_batch_size", 1000000]
    the_only(refused(SFT, *flags), "decisions cannot be shared by 1000000 ranks", "use fewer ranks")
    assert any("training frames cannot be shared by 1000000 ranks" in p for p in refused(REWARD_MODEL, *flags))


BAD_NUMBERS = {
    PPO: {
        "--actor_learning_rate": "-1e-4",
        "--critic_learning_rate": "nan",
        "--gamma": "1.5",
        "--lambd": "-0.1",
        "--temperature": "0",
        "--eps_clip": "nan",
        "--init_kl_coef": "-1",
        "--entropy_loss_coef": "inf",
        "--max_norm": "-1",
        "--l2": "nan",
        "--lr_warmup_ratio": "2",
        "--value_clip": "-0.2",
        "--eps_clip_dual": "1",
        "--reward_model_coef": "nan",
        "--num_envs": "0",
        "--seed": "-1",
        "--max_epochs": "0",
        "--micro_train_batch_size": "0",
        "--micro_rollout_batch_size": "-3",
        "--save_steps": "-1",
        "--eval_steps": "-1",
        "--logging_steps": "0",
        "--lora_rank": "-1",
        "--reward": "success:nan",
    },
    SFT: {"--learning_rate": "nan", "--l2": "-0.1", "--label_smoothing": "1", "--tiny_vision_dim": "18"}
    | {"--tiny_llm_dim": "33", "--tiny_patch_size": "7", "--train_batch_size": "0", "--seed": "-1"},
    EVAL: {"--temperature": "-1", "--num_envs": "0", "--seed": "-5", "--image_size": "2"},
    COLLECT: {"--noise_std": "nan", "--num_demos": "0", "--max_attempts": "0", "--num_envs": "-2", "--seed": "-1"},
}


@pytest.mark.parametrize("main", BAD_NUMBERS, ids=["ppo", "sft", "eval", "collect"])
def test_negative_and_nan_numbers_all_at_once(refused: Refused, policy: Path, demos_file: Path, main: Callable) -> None:
    context = {
        PPO: ["--pretrain", policy],
        EVAL: ["--pretrain", policy],
        SFT: ["--demos", demos_file],
        COLLECT: ["--task_suite_name", "toy_reach"],
    }[main]
    flags = BAD_NUMBERS[main]
    problems = refused(main, *context, *(word for pair in flags.items() for word in pair))
    for flag in flags:
        name = flag.removeprefix("--")
        assert any(p.flag == name or f"{flag} " in p for p in problems), flag
    assert len(problems) <= len(flags) + 1


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--adam_betas", "0.9", "1.0"], "out_of_range"),
        (["--eps_clip_low_high", "0.3", "0.2"], "out_of_range"),
        (["--eps_clip_low_high", "0.3"], "out_of_range"),
        (["--use_kl_loss"], "no_effect"),
        (["--kl_target", "0.1"], "no_effect"),
        (["--reward", "sucess:1"], "unknown_name"),
        (["--log_prob_level", "chunk"], "contradiction"),
    ],
)
def test_settings_that_mean_nothing(refused: Refused, policy: Path, flags: list, reason: str) -> None:
    assert kinds(refused(PPO, "--pretrain", policy, *flags)) == [(flags[0].removeprefix("--"), reason)]


@pytest.mark.parametrize("stage", [0, 2])
@pytest.mark.parametrize("main", [PPO, SFT, REWARD_MODEL], ids=["ppo", "sft", "reward model"])
def test_offload_without_the_stage_that_shares_it_out(
    refused: Refused, policy: Path, tmp_path: Path, main: Callable, stage: int
) -> None:
    """In every command that trains, and together with its other problems."""
    context = {
        PPO: ["--pretrain", policy, "--num_episodes", "7"],
        SFT: ["--demos", tmp_path / "nowhere.hdf5"],
        REWARD_MODEL: ["--demos", tmp_path / "nowhere.hdf5"],
    }[main]
    problems = refused(main, *context, "--zero_stage", stage, "--param_offload", "--adam_offload")
    optimizer, parameters = (
        [kind for kind in kinds(problems) if kind == (f"{name}_offload", "needs_flag")] for name in ("adam", "param")
    )
    assert len(parameters) == 1 and len(optimizer) == (stage == 0)
    assert len(problems) > len(optimizer) + len(parameters), "and what is wrong besides"


def test_grpo_has_no_critic(refused: Refused, policy: Path) -> None:
    flags = ["--advantage_estimator", "grpo", "--n_samples_per_prompt", 2, "--freezing_actor_steps", 2]
    problems = refused(PPO, "--pretrain", policy, *flags, "--critic_pretrain", policy)
    assert kinds(problems) == [("critic_pretrain", "no_effect"), ("freezing_actor_steps", "no_effect")]


GROUPS_OF_4 = ["--n_samples_per_prompt", 4, "--rollout_batch_size", 16]
GRPO = ["--advantage_estimator", "grpo", *GROUPS_OF_4]


@pytest.mark.parametrize(
    ("flags", "flag", "reason"),
    [
        # what the estimator does not read, also at its default value
        ([*GRPO, "--value_clip", "0.2"], "value_clip", "no_effect"),
        ([*GRPO, "--gamma", "0.9"], "gamma", "no_effect"),
        ([*GRPO, "--normalize_values"], "normalize_values", "no_effect"),
        ([*GRPO, "--critic_learning_rate", "1e-3"], "critic_learning_rate", "no_effect"),
        ([*GRPO, "--share_backbone"], "share_backbone", "no_effect"),
        (["--vf_coef", "0.5"], "vf_coef", "no_effect"),
        (["--share_backbone", "--vf_coef", "0"], "vf_coef", "out_of_range"),
        (["--share_backbone", "--critic_learning_rate", "1e-3"], "critic_learning_rate", "no_effect"),
        (["--share_backbone", "--freezing_actor_steps", "1"], "freezing_actor_steps", "no_effect"),
        (["--whiten_per_task"], "whiten_per_task", "no_effect"),
        (["--no-norm_adv_by_std"], "norm_adv_by_std", "no_effect"),
        (["--f_norm", "2"], "f_norm", "no_effect"),
        (["--advantage_estimator", "rloo", *GROUPS_OF_4, "--singleton", "zero"], "singleton", "no_effect"),
        # what the loss does not read
        (["--tau_pos", "1.0"], "tau_pos", "no_effect"),
        (["--policy_loss", "sapo", "--eps_clip", "0.1"], "eps_clip", "no_effect"),
        (["--policy_loss", "gspo", "--eps_clip_dual", "3"], "eps_clip_dual", "no_effect"),
        (["--cov_ratio", "0.1"], "cov_ratio", "no_effect"),
        ([*GRPO, "--policy_loss", "gspo", "--loss_agg_mode", "token-sum"], "loss_agg_mode", "no_effect"),
        (["--loss_horizon", "10"], "loss_horizon", "no_effect"),
        (["--eps_clip_low_high", "10", "0.28"], "eps_clip_low_high", "out_of_range"),
        (["--policy_loss", "cispo", "--eps_clip_low_high", "0.3", "0.2"], "eps_clip_low_high", "out_of_range"),
        # groups
        (["--advantage_estimator", "grpo_passk"], "advantage_estimator", "too_few"),
        (["--advantage_estimator", "opo"], "advantage_estimator", "too_few"),
        (["--filter_zero_variance"], "filter_zero_variance", "too_few"),
        (["--advantage_estimator", "remax", "--log_prob_level", "chunk"], "log_prob_level", "contradiction"),
        # KL
        (["--init_kl_coef", "0.1", "--use_kl_loss", "--use_kl_in_reward"], "use_kl_in_reward", "contradiction"),
        (["--init_kl_coef", "0.1", "--no-use_kl_in_reward"], "use_kl_in_reward", "needs_flag"),
        (["--init_kl_coef", "0.1", "--kl_estimator", "k3+"], "kl_estimator", "contradiction"),
        (["--kl_estimator", "k3"], "kl_estimator", "no_effect"),
        (["--init_kl_coef", "0.1", "--kl_horizon", "9"], "kl_horizon", "no_effect"),
        (["--init_kl_coef", "0.1", "--advantage_estimator", "gdpo", *GROUPS_OF_4], "init_kl_coef", "contradiction"),
        # bounds
        (["--policy_loss", "clip_cov", "--cov_low", "6"], "cov_low", "bounds_crossed"),
        ([*GRPO, "--filter_accuracy", "--accuracy_lower_bound", "0.95"], "accuracy_lower_bound", "bounds_crossed"),
        (["--rollout_is", "tis", "--rollout_is_low", "3"], "rollout_is_low", "bounds_crossed"),
        (["--rollout_is", "seq_mask_tis", "--rollout_is_level", "sequence"], "rollout_is", "contradiction"),
        (["--async_rollout", "--rollout_is_high", "3"], "rollout_is_high", "no_effect"),
        (["--rollout_actors", "2"], "rollout_actors", "no_effect"),
        (["--async_rollout", "--proximal", "interpolate", "--share_backbone"], "proximal", "contradiction"),
        (["--async_rollout", "--proximal", "interpolate", "--desired_kl", "0.01"], "proximal", "contradiction"),
        (["--desired_kl", "0"], "desired_kl", "out_of_range"),
        (["--async_rollout", "--deterministic_rollout", "--partial_rollout"], "deterministic_rollout", "contradiction"),
        (
            ["--async_rollout", "--deterministic_rollout", "--max_staleness", "2"],
            "deterministic_rollout",
            "contradiction",
        ),
        (["--async_rollout", "--proximal", "interpolate", "--rollout_rs", "k3"], "proximal", "contradiction"),
        (
            [
                *("--async_rollout", "--advantage_estimator", "gdpo"),
                *GROUPS_OF_4,
                "--reward_schedule",
                "success:linear:1:0.1",
            ],
            "reward_schedule",
            "contradiction",
        ),
        (["--reward_clip_range", "1"], "reward_clip_range", "out_of_range"),
        (["--reward_clip_range", "1", "-1"], "reward_clip_range", "out_of_range"),
        (["--reward_clip_range", "0", "nan"], "reward_clip_range", "out_of_range"),
        ([*GRPO, "--filter_metric", "score", "--filter_metric_range", "2", "1"], "filter_metric_range", "out_of_range"),
        (["--lora_rank", "4", "--lora_dropout", "0.1"], "lora_dropout", "contradiction"),
        (["--lora_rank", "4", "--lora_dropout", "1"], "lora_dropout", "out_of_range"),
        (["--lora_alpha", "8"], "lora_alpha", "no_effect"),
        (["--lora_targets", "all-linear"], "lora_targets", "no_effect"),
        (["--deterministic_rollout", "--rollout_max_wait_ms", "5"], "rollout_max_wait_ms", "no_effect"),
        (["--success_threshold", "0.3"], "success_threshold", "no_effect"),
        (["--success_every", "1"], "success_every", "no_effect"),
        (["--live_port", "8123"], "live_port", "no_effect"),
        (["--rm_potential_scale", "0.2"], "rm_potential_scale", "no_effect"),
        (["--truncation_min_gain", "0.1"], "truncation_min_gain", "no_effect"),
        (["--critic_from", "rm_model"], "critic_from", "needs_flag"),
        ([*GRPO, "--critic_from", "rm_model"], "critic_from", "no_effect"),
        (["--share_backbone", "--save_value_network"], "save_value_network", "no_effect"),
        ([*GRPO, "--save_value_network"], "save_value_network", "no_effect"),
        (["--share_backbone", "--critic_input", "state"], "critic_input", "no_effect"),
        ([*GRPO, "--critic_input", "state"], "critic_input", "no_effect"),
        (["--critic_input", "state", "--save_value_network"], "save_value_network", "no_effect"),
        (["--save_hf_ckpt"], "save_hf_ckpt", "no_effect"),
        (["--load_checkpoint", "iteration_000010"], "load_checkpoint", "unknown_name"),
        (["--wandb_group", "mine"], "wandb_group", "no_effect"),
        (["--eval_samples", "4"], "eval_samples", "no_effect"),
        # which tasks are played
        (["--task_weights", "9:1"], "task_weights", "unknown_name"),
        (["--task_sampler", "mine.py"], "task_sampler", "malformed"),
        (["--task_sampler", "mine.py:Mine"], "task_sampler", "missing_file"),
        # what scales rewards, and filters of any number
        (["--advantage_estimator", "gdpo", *GROUPS_OF_4, "--normalize_reward"], "normalize_reward", "contradiction"),
        ([*GRPO, "--filter_metric", "score"], "filter_metric", "needs_flag"),
        ([*GRPO, "--filter_metric", "scor", "--filter_metric_range", "0", "1"], "filter_metric", "unknown_name"),
        (["--filter_metric_range", "0", "1"], "filter_metric_range", "no_effect"),
        (["--overlong_penalty_factor", "2"], "overlong_penalty_factor", "no_effect"),
        (["--overlong_buffer_len", "10000"], "overlong_buffer_len", "out_of_range"),
        # switches that are off
        ([*GRPO, "--oversample_factor", "2"], "oversample_factor", "no_effect"),
        ([*GRPO, "--filter_zero_variance", "--accuracy_upper_bound", "0.8"], "accuracy_upper_bound", "no_effect"),
        (["--rollout_is_high", "3"], "rollout_is_high", "no_effect"),
        (["--rollout_rs_level", "token"], "rollout_rs_level", "no_effect"),
        (["--max_staleness", "2"], "max_staleness", "no_effect"),
        (["--partial_rollout"], "partial_rollout", "no_effect"),
        (["--async_rollout", "--max_staleness", "0", "--proximal", "interpolate"], "proximal", "no_effect"),
        (["--async_rollout", "--max_staleness", "-1"], "max_staleness", "out_of_range"),
        (["--train_max_tokens_per_gpu", "999"], "train_max_tokens_per_gpu", "no_effect"),
        (["--use_dynamic_batch", "--micro_train_batch_size", "4"], "micro_train_batch_size", "no_effect"),
        (["--use_dynamic_batch", "--train_max_tokens_per_gpu", "10"], "train_max_tokens_per_gpu", "too_few"),
        (["--reward_model_coef", "2"], "reward_model_coef", "no_effect"),
        (["--num_episodes", "128", "--freezing_actor_steps", "2"], "freezing_actor_steps", "contradiction"),
        (["--num_episodes", "128", "--profile_steps", "1", "3"], "profile_steps", "out_of_range"),
        (["--profile_steps", "0"], "profile_steps", "out_of_range"),
        (["--profile_steps", "1", "--val_only"], "profile_steps", "contradiction"),
    ],
)
def test_flags_that_nothing_would_read_or_that_contradict(
    refused: Refused, policy: Path, flags: list, flag: str, reason: str
) -> None:
    assert kinds(refused(PPO, "--pretrain", policy, *flags)) == [(flag, reason)]


@pytest.mark.parametrize(
    ("main", "flags"),
    [
        (EVAL, ["--temperature", "0.5"]),
        (EVAL, ["--eval_samples", "4"]),
        (EVAL, ["--allow_unpaired"]),
        (EVAL, ["--video_cameras", "top"]),
        (EVAL, ["--success_frames", "2"]),
        (EVAL, ["--vlm_model", "x"]),
        (EVAL, ["--rm_model_batch_size", "3"]),
        (EVAL, ["--rollout_max_wait_ms", "5", "--deterministic_rollout"]),
        (SFT, ["--no-use_proprio"]),
        (SFT, ["--lora_alpha", "8"]),
        (SFT, ["--lora_dropout", "0"]),
        (REWARD_MODEL, ["--use_proprio"]),
        (REWARD_MODEL, ["--failure_progress_cap", "0.4", "--progress_coef", "0"]),
    ],
)
def test_what_a_command_does_not_read(refused: Refused, policy: Path, main: Callable, flags: list[str]) -> None:
    problems = refused(main, "--pretrain", policy, *flags)
    assert (flags[0].removeprefix("--").removeprefix("no-"), "no_effect") in kinds(problems)


@pytest.mark.parametrize(
    "flags", [["--offset_prob", "0.5"], ["--offset_max", "0.1"], ["--temperature", "0.5"], ["--unnorm_key", "x"]]
)
def test_what_the_scripted_expert_does_not_read(refused: Refused, flags: list[str]) -> None:
    problems = refused(COLLECT, "--task_suite_name", "toy_reach", *flags)
    assert kinds(problems) == [(flags[0].removeprefix("--"), "no_effect")]


@pytest.mark.parametrize("main", [SFT, REWARD_MODEL], ids=["sft", "reward model"])
def test_a_learning_rate_of_0_trains_nothing(refused: Refused, main: Callable) -> None:
    assert "--learning_rate 0.0: must be greater than 0" in str(refused(main, "--learning_rate", "0"))


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        ([*GRPO, "--gamma", "0.9"], "--gamma 0.9: --advantage_estimator grpo does not use it; leave it out"),
        (
            ["--num_episodes", "65"],
            "--num_episodes 65 is not a multiple of the 64 episodes of an iteration; give 64 or 128",
        ),
        (["--cov_low", "6", "--policy_loss", "clip_cov"], "--cov_low 6.0 exceeds --cov_high 5.0; swap them"),
        (
            ["--init_kl_coef", "0.1", "--no-use_kl_in_reward"],
            "--no-use_kl_in_reward: --init_kl_coef 0.1 would have no effect; give --use_kl_loss, or no weight",
        ),
        (["--profile_steps", "0"], "--profile_steps 0: must be at least 1"),
    ],
)
def test_a_text_names_the_value_and_the_remedy(refused: Refused, policy: Path, flags: list, text: str) -> None:
    assert [str(problem) for problem in refused(PPO, "--pretrain", policy, *flags)] == [text]


@pytest.mark.parametrize(
    ("flags", "accelerator", "reason"),
    [
        (["--zero_stage", "2"], False, "unavailable"),
        (["--bf16"], False, "unavailable"),  # it runs as stage 2
        ([], True, "needs_flag"),
        (["--zero_stage", "2", "--adam_offload"], True, "contradiction"),
    ],
)
def test_offloading_needs_somewhere_to_move_from(
    refused: Refused, policy: Path, monkeypatch: pytest.MonkeyPatch, flags: list, accelerator: bool, reason: str
) -> None:
    monkeypatch.setattr("rlvla.commands.ppo_checks.has_accelerator", lambda: accelerator)
    problems = refused(PPO, "--pretrain", policy, "--offload_during_rollout", *flags)
    assert kinds(problems) == [("offload_during_rollout", reason)]


@pytest.mark.parametrize(
    ("flags", "reasons"),
    [
        ([], ["unavailable"]),
        (["--zero_stage", "3"], ["contradiction", "unavailable"]),
        (["--rollout_backend", "actors"], ["no_effect", "unavailable"]),
    ],
)
def test_cuda_graphs(refused: Refused, policy: Path, flags: list[str], reasons: list[str]) -> None:
    """There is no GPU here."""
    problems = refused(PPO, "--pretrain", policy, "--cuda_graphs", *flags)
    assert [reason for flag, reason in kinds(problems) if flag == "cuda_graphs"] == reasons


def test_unknown_estimator_and_loss_list_the_known(refused: Refused) -> None:
    assert "reinforce_plus_plus" in refused(PPO, "--advantage_estimator", "grop")[0]
    assert "geo_mean" in refused(PPO, "--policy_loss", "pp0")[0]


@pytest.mark.parametrize(
    ("word", "suggestion"), [("--actor_learning_rat", "--actor_learning_rate"), ("--lambda", "--lambd")]
)
def test_mistyped_flag_suggests_the_nearest(refused: Refused, word: str, suggestion: str) -> None:
    problems = refused(PPO, word, "1")
    assert f"unknown flag {word}; did you mean {suggestion}?" in problems[0]


def test_value_of_the_wrong_kind(refused: Refused) -> None:
    assert "--num_episodes" in refused(PPO, "--num_episodes", "many")[0]


def test_problems_of_different_kinds_are_reported_at_once(refused: Refused, policy: Path) -> None:
    (policy / "tokenizer.json").unlink()
    other = policy.parent / "other"
    other.mkdir()
    (other / "metrics.jsonl").write_text("{}\n")
    problems = refused(
        PPO,
        *("--pretrain", policy, "--task_ids", 3, "--gamma", "nan", "--advantage_estimator", "grpo"),
        *("--train_batch_size", 48, "--save_path", other),
    )
    for words in ("tokenizer.json", "task 3", "--gamma", "grpo", "--train_batch_size", "another run"):
        assert sum(words in problem for problem in problems) == 1, words
    assert len(problems) == 6


# ------------------------------------------------------------------------------------- output folders
@pytest.mark.parametrize(
    ("main", "flag"), [(PPO, "--save_path"), (PPO, "--ckpt_path"), (SFT, "--save_path"), (COLLECT, "--output")]
)
def test_output_folder_of_another_run(
    refused: Refused, policy: Path, demos_file: Path, tmp_path: Path, main: Callable, flag: str
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text("{}\n")
    context = {
        PPO: ["--pretrain", policy],
        SFT: ["--demos", demos_file],
        COLLECT: ["--task_suite_name", "toy_reach"],
    }[main]
    the_only(refused(main, *context, flag, tmp_path / "run"), flag, "already holds another run")


def test_a_file_in_the_place_of_the_folder(refused: Refused, policy: Path, tmp_path: Path) -> None:
    (tmp_path / "run").write_text("")
    the_only(refused(PPO, "--pretrain", policy, "--save_path", tmp_path / "run"), "is a file")


def test_continuing_in_a_folder_of_another_command(refused: Refused, policy: Path) -> None:
    problems = refused(PPO, "--pretrain", policy, "--save_path", policy, "--load_checkpoint")
    the_only(problems, "--save_path", "holds no run of this command")


# ------------------------------------------------------------------------------------- initial states
def test_evaluation_states_inside_the_training_states(refused: Refused, policy: Path) -> None:
    problems = refused(PPO, "--pretrain", policy, "--eval_init_states", 0, 200, "--eval_episodes", 200)
    the_only(problems, "200 initial states", "--eval_protocol shared")
    problems = refused(PPO, "--pretrain", policy, "--train_init_states", 0, 8100)
    the_only(problems, "100 initial states are used for training and for evaluation")
    problems = refused(EVAL, "--pretrain", policy, "--eval_init_states", 7990, 8090)
    the_only(problems, "10 initial states")


def test_demonstrations_made_on_the_evaluation_states(policy_of_shared_demos: Path, refused: Refused) -> None:
    for main in (PPO, EVAL):
        problems = refused(main, "--pretrain", policy_of_shared_demos)
        the_only(problems, "initial states are used for training and for evaluation", "--eval_protocol shared")


def test_heldout_tasks_are_not_trained_on(refused: Refused, policy: Path, demos_file: Path) -> None:
    heldout = ["--heldout_tasks", "reach"]
    the_only(refused(SFT, "--demos", demos_file, *heldout), f"{demos_file} was trained on reach")
    of_others = refused(SFT, "--demos", demos_file, *heldout, "--env_python", sys.executable)  # which lists the tasks
    the_only(of_others, f"{demos_file} was trained on reach")
    problems = refused(PPO, "--pretrain", policy, *heldout)
    assert kinds(problems) == [("heldout_tasks", "contradiction"), ("heldout_tasks", "mismatch")]
    assert f"{policy} was trained on reach" in problems[1]
    problems = refused(REWARD_MODEL, "--demos", demos_file, "--pretrain", policy, *heldout)  # and they lack failures
    assert ("heldout_tasks", "mismatch") in kinds(problems)


def test_tasks_without_an_expert_are_not_recorded(refused: Refused, tmp_path: Path) -> None:
    robosuite = ["--task_suite_name", "robosuite", "--task_names", "Door"]
    the_only(
        refused(COLLECT, *robosuite), "no scripted expert for robosuite task Door", "Lift, Stack", "--policy FOLDER"
    )
    gym = [
        "--task_suite_name",
        "gym:rlvla/Point-v0",
        "--custom_module",
        Path(__file__).resolve().parents[1] / "support" / "gym_point.py",
    ]
    pytest.importorskip("gymnasium")
    the_only(refused(COLLECT, *gym), "'gym:rlvla/Point-v0' has no scripted expert", "--policy FOLDER")


def test_tasks_that_are_held_out_are_not_recorded(refused: Refused) -> None:
    given = ["--task_suite_name", "metaworld", "--task_names", "reach", "push", "--heldout_tasks", "ML10-test", "push"]
    the_only(refused(COLLECT, *given), "--heldout_tasks: push would be trained on")


def test_mixed_in_demonstrations_made_on_the_evaluation_states(
    policy_of_shared_demos: Path, policy: Path, refused: Refused
) -> None:
    demos = policy_of_shared_demos.parents[1] / "demos" / "demos.hdf5"
    problems = refused(PPO, "--pretrain", policy, "--ptx_coef", 0.1, "--ptx_demos", demos)
    overlap = [problem for problem in problems if "initial states are used for training and for evaluation" in problem]
    assert len(overlap) == 1 and overlap[0].flag == "ptx_demos" and "--ptx_demos: " in overlap[0]


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--eval_episodes", 2001], "out_of_range"),
        (["--eval_init_states", 9000, 9010], "too_few"),
        (["--eval_init_states", 9990, 10_001], "out_of_range"),
        (["--train_init_states", 50, 50], "out_of_range"),
    ],
)
def test_initial_states_that_do_not_exist(refused: Refused, policy: Path, flags: list, reason: str) -> None:
    assert kinds(refused(PPO, "--pretrain", policy, *flags)) == [(flags[0].removeprefix("--"), reason)]


# ------------------------------------------------------------------------------------- the machine
class TestProblemsOfTheMachine:
    """Found by the workers, which are gone again afterwards."""

    @pytest.fixture
    def starts_allowed(self) -> bool:
        return True

    @pytest.mark.parametrize("main", [PPO, EVAL, COLLECT])
    def test_a_screen_is_needed(
        self, refused: Refused, robosuite_policy: Path, monkeypatch: pytest.MonkeyPatch, main: Callable
    ) -> None:
        pytest.importorskip("robosuite")
        monkeypatch.setenv("MUJOCO_GL", "glfw")
        where = ["--task_suite_name", "robosuite"] if main is COLLECT else ["--pretrain", robosuite_policy]
        the_only(refused(main, *where, "--num_envs", 2), "MUJOCO_GL='glfw'", "egl or osmesa")

    def test_gl_that_does_not_work(
        self, refused: Refused, robosuite_policy: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        pytest.importorskip("robosuite")
        monkeypatch.setenv("MUJOCO_GL", "egl")
        monkeypatch.setenv("MUJOCO_EGL_DEVICE_ID", "97")
        the_only(refused(PPO, "--pretrain", robosuite_policy, "--num_envs", 1), "no working GL", "libegl1")

    @pytest.mark.parametrize("main", [PPO, COLLECT])
    def test_extra_not_installed(
        self, refused: Refused, robosuite_policy: Path, monkeypatch: pytest.MonkeyPatch, main: Callable
    ) -> None:
        hide = Path(__file__).resolve().parents[1] / "support" / "without_robosuite"
        monkeypatch.setenv("PYTHONPATH", str(hide))
        where = ["--task_suite_name", "robosuite"] if main is COLLECT else ["--pretrain", robosuite_policy]
        the_only(refused(main, *where, "--num_envs", 1), "robosuite", "pip install", "rlvla[robosuite]")


# ------------------------------------------------------------------------------------- what is allowed
def test_shared_protocol_allows_the_same_states(policy_of_shared_demos: Path, capsys: pytest.CaptureFixture) -> None:
    flags = ["--pretrain", str(policy_of_shared_demos), "--eval_protocol", "shared", "--eval_episodes", "2"]
    EVAL([*flags, "--num_envs", "1"])
    assert "protocol shared" in capsys.readouterr().out


@pytest.mark.parametrize("main", [PPO, EVAL, COLLECT])
def test_an_interpreter_that_will_not_do_is_refused(refused: Refused, policy_folder: Path, main: Callable) -> None:
    start = ["--task_suite_name", "toy_reach"] if main is COLLECT else ["--pretrain", policy_folder]
    problems = refused(main, *start, "--env_python", "no/such/python")
    the_only(problems, "--env_python no/such/python", "not an executable")


@pytest.mark.parametrize("main", [PPO, EVAL, COLLECT, CHECK_ENV])
def test_workers_that_cannot_be_where_they_are_asked_to_be(
    refused: Refused, policy_folder: Path, monkeypatch: pytest.MonkeyPatch, main: Callable
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)  # not installed
    start = ["--pretrain", policy_folder] if main in (PPO, EVAL) else ["--task_suite_name", "toy_reach"]
    problems = refused(main, *start, "--env_backend", "ray", "--env_python", sys.executable)
    assert len(problems) == 2, problems
    assert "--env_python" in problems[0] and "Ray cluster" in problems[0]
    assert "--env_backend ray" in problems[1] and "rlvla[ray]" in problems[1]
    the_only(refused(main, *start, "--ray_frames", "png"), "--ray_frames png", "--env_backend ray")
