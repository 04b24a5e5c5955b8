"""What is refused because of the way in which a flow-matching policy draws its actions; all of it at once."""

from __future__ import annotations

from pathlib import Path

import pytest

from cli.train_ppo_vla import build_parser
from rlvla.commands.ppo_checks import check
from rlvla.commands.ppo_flags import PPORun
from rlvla.models.vla.tiny import build_tiny
from rlvla.utils.errors import ConfigError
from tests.support.flow_folders import TOY, TWO, write_flow

GROUPS_OF_4 = ["--n_samples_per_prompt", "4", "--advantage_estimator", "grpo"]
ODE = ["--flow_method", "ode", "--policy_loss", "fpo"]
NFT = ["--algorithm", "nft"]
ALL = ["--flow_noisy_steps", "all"]


@pytest.fixture(scope="module")
def flow_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_flow(tmp_path_factory.mktemp("flow") / "policy")


@pytest.fixture(scope="module")
def token_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy that is no flow."""
    sizes = {"vision_dim": 16, "llm_dim": 32, "llm_mlp_dim": 64, "llm_layers": 1, "image_size": 16}
    colors = ("red", "green", "blue", "yellow")
    return build_tiny(
        tmp_path_factory.mktemp("tokens") / "policy",
        sentences=[f"reach the {color} disc" for color in colors],
        dataset_statistics={"toy_reach": {"action": TWO, "proprio": TWO}},
        action_dim=2,
        use_proprio=True,
        proprio_dim=2,
        **sizes,
    )


def problems(folder: Path, tmp_path: Path, *words: str) -> set[tuple[str | None, str]]:
    """(flag, reason) of all problems."""
    argv = ["--pretrain", str(folder), "--save_path", str(tmp_path / "run"), *TOY, "--eval_episodes", "2", *words]
    namespace = build_parser().parse_args(argv)
    try:
        check(PPORun.from_namespace(namespace))
    except ConfigError as error:
        return {(problem.flag, problem.reason) for problem in error.problems}
    return set()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], set()),
        (GROUPS_OF_4, set()),
        ([*GROUPS_OF_4, *ODE], set()),
        ([*ALL, "--policy_loss", "dppo"], set()),
        (["--flow_method", "noise", "--entropy_loss_coef", "0.01"], set()),
        (["--entropy_loss_coef", "0.01"], {("entropy_loss_coef", "mismatch")}),
        (["--policy_loss", "clip_cov"], {("policy_loss", "mismatch")}),
        (["--policy_loss", "kl_cov"], {("policy_loss", "mismatch")}),
        (["--policy_loss", "dppo_tv"], {("policy_loss", "mismatch")}),
        (["--policy_loss", "dppo"], {("policy_loss", "needs_flag")}),
        ([*GROUPS_OF_4, "--policy_loss", "fpo"], {("policy_loss", "needs_flag")}),
        ([*GROUPS_OF_4, "--flow_method", "ode"], {("flow_method", "needs_flag")}),
        ([*GROUPS_OF_4, "--flow_method", "ode", "--policy_loss", "dppo"], {("policy_loss", "needs_flag")}),
        ([*GROUPS_OF_4, *ODE, "--log_prob_level", "chunk"], {("log_prob_level", "no_effect")}),
        ([*GROUPS_OF_4, *ODE, "--eps_clip", "0.1"], {("eps_clip", "no_effect")}),
        ([*GROUPS_OF_4, "--fpo_clip", "0.1"], {("fpo_clip", "no_effect")}),
        ([*GROUPS_OF_4, "--denoising_gamma", "0.9"], {("denoising_gamma", "no_effect")}),
        ([*ALL, "--policy_loss", "dppo", "--denoising_clip", "0.1", "0.01"], {("denoising_clip", "out_of_range")}),
        (
            [*ODE, "--entropy_loss_coef", "0.01", "--init_kl_coef", "0.1", "--rollout_is", "tis", "--rollout_rs", "k3"]
            + ["--temperature", "1.2", "--target_kl", "0.1", "--desired_kl", "0.01"],
            {
                ("advantage_estimator", "mismatch"),  # gae, which needs a critic
                *((name, "mismatch") for name in ("entropy_loss_coef", "kl_estimator", "rollout_is", "rollout_rs")),
                *((name, "mismatch") for name in ("temperature", "target_kl", "desired_kl")),
            },
        ),
        ([*ODE, "--share_backbone"], {("share_backbone", "mismatch")}),
        ([*GROUPS_OF_4, "--flow_noise_level_end", "0.1"], set()),
        (["--flow_method", "noise", "--flow_noise_level_end", "0.1"], {("flow_noise_level_end", "mismatch")}),
        ([*GROUPS_OF_4, *ODE, "--flow_noise_level_end", "0.1"], {("flow_noise_level_end", "mismatch")}),
        (["--flow_noise_level_end", "1.5"], {("flow_noise_level_end", "out_of_range")}),
        ([*GROUPS_OF_4, *NFT], set()),
        (NFT, {("advantage_estimator", "contradiction")}),
        ([*GROUPS_OF_4, *NFT, "--flow_method", "ode"], {("algorithm", "needs_flag")}),
        ([*GROUPS_OF_4, *NFT, "--flow_method", "noise"], {("algorithm", "needs_flag")}),
        ([*GROUPS_OF_4, "--nft_beta", "2"], {("nft_beta", "no_effect")}),
        ([*GROUPS_OF_4, *NFT, "--nft_reward", "success", "--nft_clip", "2"], {("nft_clip", "no_effect")}),
        (
            [*GROUPS_OF_4, *NFT, "--policy_loss", "sapo", "--init_kl_coef", "0.1", "--rollout_is", "tis"]
            + ["--ema_beta", "0.9", "--zero_stage", "3", "--entropy_loss_coef", "0.01"],
            {
                *((name, "no_effect") for name in ("policy_loss", "init_kl_coef", "rollout_is", "ema_beta")),
                *(("zero_stage", "contradiction"), ("ema_beta", "contradiction")),
                *(("entropy_loss_coef", "no_effect"), ("entropy_loss_coef", "mismatch")),
            },
        ),
    ],
    ids=lambda value: " ".join(value[-3:]) if isinstance(value, list) else "",
)
def test_what_makes_no_sense_is_refused_by_name(flow_folder: Path, tmp_path: Path, words: list, expected: set) -> None:
    assert problems(flow_folder, tmp_path, *words) == expected


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--policy_loss", "dppo"], ("policy_loss", "needs_flag")),
        ([*GROUPS_OF_4, "--policy_loss", "fpo"], ("policy_loss", "needs_flag")),
        ([*GROUPS_OF_4, *NFT], ("algorithm", "needs_flag")),
        (["--flow_noise_level_end", "0.1"], ("flow_noise_level_end", "mismatch")),
        ([], None),
    ],
)
def test_other_policies_have_no_denoising_steps(
    token_folder: Path, tmp_path: Path, words: list, expected: tuple | None
) -> None:
    assert problems(token_folder, tmp_path, *words) == ({expected} if expected else set())
