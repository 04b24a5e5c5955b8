"""Every command of the documentation, executed: page by page, in the order of the page, with its amounts cut down.

A page's commands run in a folder of its own. What the page takes for granted (`GIVEN`) is put there; flags appended
to a command make it small (`SMALLER`), for a flag given twice counts as given last. Commands of `cli/` run inside
this process, on one rank (the launcher has tests in tests/integration/test_launcher.py).
"""

from __future__ import annotations

import importlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rlvla.envs.libero.install import task_names
from rlvla.models.vla.openvla import OpenVLAForActionPrediction
from tests.support.documentation import DOCUMENTS, ROOT, blocks, shell_commands
from tests.support.judge_server import completion, judge_server
from tests.support.libero_files import write_demos
from tests.support.libero_requirements import require_libero
from tests.support.robosuite_primitives import soft_actor_of_primitives
from tests.support.robosuite_reference import require_simulator

OFTEN = ("README.md",)  # run by each CI, the others by the nightly one
PAGES = [page for page in DOCUMENTS if shell_commands(page.read_text(encoding="utf-8"))]

# Command, or how it begins -> why it is not run here.
NOT_RUN = {
    "bash examples/scripts/quickstart.sh": "minutes; tests/integration/test_run_recipe.py runs a smaller recipe",
    "bash examples/scripts/setup.sh": "installs packages from the network",
    "source .venv/bin/activate": "tests run in an environment already",
    "bash examples/scripts/test.sh": "it is what runs this test",
    "bash examples/scripts/toy_reach.sh": "run at full length by tests/learning/test_learns_toy_reach.py",
    "bash examples/scripts/install_robosuite15.sh": "installs packages from the network",
    "bash examples/scripts/install_openvla.sh": "as above",
    "bash examples/scripts/install_maniskill.sh": "as above",
    "bash examples/scripts/install_vllm.sh": "as above",
    "bash examples/scripts/install_libero.sh": "as above",
    "python cli/train_ppo_vla.py --pretrain runs/openvla/sft/policy": "needs that installation; "
    "tests/integration/test_vllm_rollout.py runs a small one",
    "python cli/check_env.py maniskill --env_python .venv-maniskill/bin/maniskill-python": "needs that installation",
    "python cli/check_env.py robosuite --env_python .venv-robosuite15/bin/python": "needs that installation; "
    "tests/integration/test_env_python.py runs commands with another interpreter",
    "python cli/collect_demos.py --task_suite_name robosuite --env_python .venv-robosuite15/bin/python": "as above",
    "bash examples/scripts/serve_vlm_vllm.sh": "needs the weights of a vision-language model; "
    "tests/integration/test_vlm_servers.py serves a tiny one",
    "python benchmarks/reward_machine_learning.py": "six learning runs of 6,144 episodes each",
    "python benchmarks/algorithm_curves.py": "84 learning runs",
    "python benchmarks/one_gpu.py": "minutes of planning networks of 7 billion parameters; "
    "tests/unit/commands/test_dry_run.py plans small ones",
    "python benchmarks/memory_plan.py": "minutes; tests/unit/commands/test_dry_run.py compares the same",
    "deepspeed -q --num_accelerators 2 benchmarks/memory_plan.py": "as above",
    "python benchmarks/lift_overlap.py": "plays with the policy of the quickstart",
    "python benchmarks/lock_step.py": "many simulators; tests/unit/envs/workers/test_slots.py compares the same",
    "python benchmarks/trace_iteration.py": "rewrites the page; tests/integration/test_trace.py compares it",
    "python benchmarks/share_backbone.py": "six learning runs",
    "python benchmarks/bf16_training.py": "learning runs; tests/integration/test_bf16_training.py has small ones",
    "python cli/eval_vla.py --pretrain runs/bf16/smolvla_bf16_0/policy": "needs those runs",
    "python benchmarks/learning.py": "18 learning runs",
    "python benchmarks/flow_ablation.py": "eight learning runs",
    "hf download": "needs the network",
    "python cli/push_to_hub.py runs/lift/ppo/policy --repo_id you/lift --license": "needs the network; "
    "tests/unit/commands/test_push_to_hub.py uploads to a server of its own",
    "python cli/inspect_vla.py --pretrain checkpoints/smolvla_base": "needs 900 MB of weights; "
    "tests/integration/test_smolvla_training.py runs these commands with small ones",
    "python cli/train_sft_vla.py --pretrain checkpoints/smolvla_base": "as above",
    "python cli/eval_vla.py --pretrain checkpoints/smolvla_libero": "as above",
    "python cli/train_ppo_vla.py --pretrain runs/libero_sft/policy": "as above",
    "python cli/train_sac_vla.py --custom_module tests/support/state_reach.py": "a suite of the tests; "
    "tests/integration/test_sac_training.py runs a smaller one",
    "python cli/tune_sft_vla.py": "several training runs; tests/integration/test_tune_sft.py runs a small one",
    "python cli/train_sft_vla.py --config runs/tune/choice.yaml": "as above",
    "python cli/dagger_vla.py": "rounds of three commands each; tests/integration/test_dagger.py runs smaller ones",
    "python cli/train_sac_vla.py --policy dsrl": "needs a flow policy; "
    "tests/integration/test_dsrl_training.py makes one",
    "python cli/eval_vla.py --pretrain runs/quickstart/ppo/policy": "needs the quickstart; "
    "tests/integration/test_eval_suites.py evaluates under perturbations",
    "pip install": "needs the network",
    "eval": "for one's own shell; tests/unit/utils/cli/test_completion.py completes flags",
    "python -m venv .venv-libero-pro": "needs the network",
    ".venv-libero-pro/bin/pip install": "needs the network",
    "python cli/eval_vla.py --pretrain runs/libero/sft --platform libero --env_python": "needs that "
    "installation; tests/unit/envs/libero/test_pro.py reads files of its layout",
    "python cli/eval_vla.py --pretrain runs/toy_reach/ppo/policy": "needs that run; "
    "tests/learning/test_learns_toy_reach.py evaluates it so",
    "python cli/train_sft_vla.py --demos runs/demos runs/own": "needs a return model that explains something; "
    "tests/unit/trainer/supervised/test_advantage_conditioning.py has a small one",
    "python cli/eval_vla.py --pretrain runs/recap/policy": "needs that run",
    "python cli/recap_vla.py": "rounds of four commands each; tests/unit/commands/test_recap.py checks their order",
    "lerobot-eval": "needs LeRobot",
    "python cli/eval_vla.py --remote": "needs a server; tests/integration/test_remote_eval.py starts some",
    "python benchmarks/serving.py": "needs a server; run by hand",
    "python cli/serve_vla.py": "runs until it is interrupted; tests/integration/test_serve_run.py does that",
    "python cli/teleoperate.py": "a person plays; tests/unit/teleoperation/test_browser.py does with a browser",
    "python cli/collect_demos.py --policy runs/sft/policy --intervene page": "a person plays; "
    "tests/unit/commands/test_policy_demos.py does without a browser",
    "python cli/train_sft_vla.py --demos runs/demos/demos.hdf5 runs/corrections/demos.hdf5": "needs those episodes",
    "python benchmarks/teleoperation.py": "needs a running teleoperation",
    "python benchmarks/lerobot_agreement.py": "needs LeRobot; its results are test vectors",
}

TINY = "--tiny_vision_dim 16 --tiny_llm_dim 32 --tiny_llm_layers 1"
# A start that knows nothing is no reason to stop, and groups that all fail are as good as others.
PPO = (
    "--rollout_batch_size 2 --n_samples_per_prompt 2 --train_batch_size 4 --num_episodes 8 --max_epochs 1 "
    "--num_envs 1 --eval_episodes 1 --max_steps 10 --no-check_start --save_steps 1"
)
# A command, or a word among its flags -> what is appended.
SMALLER = {
    "check_env": "--check_steps 2",
    "collect_demos": "--num_demos 3 --num_envs 1 --max_steps 10 --keep all",
    "train_sft_vla": "--max_epochs 1 --train_batch_size 16",
    "train_ppo_vla": PPO,
    "train_sac_vla": "--num_episodes 8 --rollout_batch_size 4 --random_episodes 4 --train_batch_size 8 --num_envs 1 "
    "--eval_episodes 1 --max_steps 10",
    "eval_vla": "--eval_episodes 2 --num_envs 1 --max_steps 10",
    "run_recipe": "--dry_run",
    "train_rm_vla": "--max_epochs 1 --heldout_share 0.5",
    "train_value_vla": "--max_epochs 1 --heldout_share 0.5",
    "runs/lift/measured": "--heldout_share 0.5 --eval_episodes 1 --eval_samples 2 --num_envs 1 --early_stopping 1",
    "export_policy": "--load_checkpoint iteration_000002",
    # Both outcomes are needed, in what is learned from and in what is held out.
    "runs/mixed": "--num_demos 16 --max_steps 25",
    "rollout": "--episodes 8 --env_ms 4 --workers 2",
    "train_step": "--size '0.3 M' --rows 4 --micro 2 --repeats 1",
    "policy_families": "--tasks toy_reach --repeats 1",
    "scale_model": "--gpus 1 2 --iterations 4",
    "flow_speed": "--repeats 1",
    "runs/profiled": "--profile_steps 2",
    # An actor that is frozen for two iterations is trained in the third, whose batch is replayed.
    "--freezing_actor_steps": "--num_episodes 12",
    "runs/planned": "--rollout_batch_size 8 --n_samples_per_prompt 1 --train_batch_size 8 --num_episodes 24",
    # One task, one iteration; a group that fails as a whole is kept, or nothing would be trained.
    "runs/libero/simplevla": "--task_ids 0 --num_episodes 4 --accuracy_lower_bound 0 --no-val_before_train",
    "runs/libero/report": "--task_ids 0",
    "libero_10": "--task_ids 0",
}


# -------------------------------------------------------------------------------------------------- what pages presume
Provider = Callable[[Path, pytest.FixtureRequest], None]


def copies(fixture: str, *places: str) -> Provider:
    """A folder that a session fixture has made, at these places."""

    def provide(folder: Path, request: pytest.FixtureRequest) -> None:
        made = Path(request.getfixturevalue(fixture))
        for place in places:
            shutil.copytree(made.parent if made.is_file() else made, folder / place)

    return provide


def toy_run(folder: Path, request: pytest.FixtureRequest) -> None:
    """What examples/scripts/toy_reach.sh leaves behind, config.yaml with its relative paths included."""
    copies("demos_file", "runs/toy/demos")(folder, request)
    for command in (
        "python cli/train_sft_vla.py --demos runs/toy/demos/demos.hdf5 --action_chunk_len 3 --save_path runs/toy/sft",
        "python cli/train_ppo_vla.py --pretrain runs/toy/sft/policy --save_path runs/toy/ppo",
    ):
        run(shlex.split(command), folder)


def libero_demonstrations(folder: Path, request: pytest.FixtureRequest) -> None:
    """A file of LIBERO's layout for one task of libero_spatial."""
    require_libero()
    write_demos(folder / "datasets/libero_spatial" / f"{task_names()['libero_spatial'][0]}_demo.hdf5")


def regression_checkpoint(folder: Path, request: pytest.FixtureRequest) -> None:
    """As OpenVLA-OFT publishes those that emit no tokens: the head in a file of its own, no word of it elsewhere."""
    libero = request.getfixturevalue("libero_checkpoint")
    model = OpenVLAForActionPrediction.from_pretrained(
        libero, platform="libero", model_variant="oft_regression", new_head=True
    )
    model.save_pretrained(folder / "with_head")
    published = shutil.copytree(libero, folder / "checkpoints/oft-regression-libero")
    (head,) = (folder / "with_head").glob("action_head--*_checkpoint.pt")
    shutil.copy(head, published)


def expert_on_state(folder: Path, request: pytest.FixtureRequest) -> None:
    """A soft actor that chooses primitives of Lift; it knows nothing."""
    require_simulator()
    soft_actor_of_primitives(folder / "runs/sac/lift/policy")


def recipes(folder: Path, request: pytest.FixtureRequest) -> None:
    """Those of the repository."""
    (folder / "recipes").symlink_to(ROOT / "recipes")


def robot_example(folder: Path, request: pytest.FixtureRequest) -> None:
    """A copy of the repository's."""
    shutil.copytree(ROOT / "examples/robot", folder / "examples/robot")


def times_of_7b(folder: Path, request: pytest.FixtureRequest) -> None:
    """Those of the repository."""
    (folder / "benchmarks").mkdir()
    shutil.copy(ROOT / "benchmarks/scale_model_7b.json", folder / "benchmarks")


def robotwin_checkout(folder: Path, request: pytest.FixtureRequest) -> None:
    """A small environment with the same interface."""
    (folder / "RoboTwin").symlink_to(ROOT / "tests/support/small_robotwin")


# The page's name below the repository -> what must lie in its folder.
GIVEN: dict[str, list[Provider]] = {
    **dict.fromkeys(
        [
            f"docs/{name}.md"
            for name in (
                "algorithms/choosing",
                "algorithms/filters",
                "algorithms/gae",
                "algorithms/grpo",
                "gpu",
                "one_gpu",
            )
        ],
        [copies("policy_folder", "runs/sft/policy")],
    ),
    "docs/algorithms/flow-policies.md": [recipes],
    "docs/asynchronous.md": [copies("policy_folder", "runs/sft/policy")],
    "docs/algorithms/off-policy.md": [expert_on_state, recipes],
    "docs/commands.md": [
        copies("demos_file", "runs/toy/demos"),
        copies("policy_folder", "runs/toy/sft/policy"),
        recipes,
    ],
    "docs/does_it_learn.md": [recipes],
    "docs/environments/libero.md": [libero_demonstrations],
    "docs/environments/own.md": [recipes],
    "docs/environments/own_robot.md": [robot_example],
    "docs/environments/robotwin.md": [robotwin_checkout],
    "docs/first_hour.md": [toy_run, recipes],
    "docs/models.md": [
        copies("demos_file", "runs/demos"),
        copies("libero_checkpoint", "checkpoints/openvla-oft-libero"),
        regression_checkpoint,
    ],
    "docs/recipes.md": [recipes],
    "docs/performance.md": [copies("policy_folder", "runs/sft/policy")],
    "docs/recap.md": [recipes, copies("demos_file", "runs/demos"), copies("policy_folder", "runs/sft/policy")],
    "docs/rewards.md": [copies("policy_folder", "runs/sft/policy")],
    "docs/scaling.md": [copies("policy_folder", "runs/sft/policy"), times_of_7b],
    "docs/simplevla_rl.md": [copies("libero_checkpoint", "runs/libero/sft")],
    "docs/troubleshooting.md": [copies("demos_file", "runs/demos")],
}


@pytest.fixture(scope="session")
def libero_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small checkpoint as OpenVLA-OFT publishes its own for LIBERO: nothing in it tells how it acts."""
    require_libero()
    folder = tmp_path_factory.mktemp("libero")
    for suite in ("libero_spatial", "libero_10"):
        write_demos(folder / suite / f"{task_names()[suite][0]}_demo.hdf5")
    run(shlex.split("python cli/train_sft_vla.py --demos libero_spatial --action_chunk_len 8 --save_path sft"), folder)
    policy = folder / "sft/policy"
    config = json.loads((policy / "config.json").read_text())
    untold = ("model_variant", "action_chunk_len", "image_preprocessing", "action_normalization", "gripper_convention")
    (policy / "config.json").write_text(json.dumps({k: v for k, v in config.items() if k not in untold}))
    statistics = json.loads((policy / "dataset_statistics.json").read_text())
    (entry,) = statistics.values()
    (policy / "dataset_statistics.json").write_text(json.dumps({"libero_10": entry, "libero_spatial": entry}))
    (policy / "rlvla_environment.json").unlink()
    return policy


# -------------------------------------------------------------------------------------------- circumstances of commands
def undecided(request: dict) -> tuple[int, dict]:
    """What fits the schema that is asked for: 0.5 for every number, the first of several words."""
    fields = request["response_format"]["json_schema"]["schema"]["properties"]
    return 200, completion(json.dumps({name: kind.get("enum", [0.5])[0] for name, kind in fields.items()}))


@contextmanager
def a_judge(words: list[str]) -> Iterator[list[str]]:
    """The page's server is a small one on another port."""
    pytest.importorskip("pydantic", reason="the extra vlm is not installed")
    with judge_server() as server:
        server.answer = undecided
        yield [*words, "--vlm_url", f"{server.url}/v1"]
        assert server.requests, "nothing was judged"


@contextmanager
def a_gradient_of_nan(words: list[str]) -> Iterator[list[str]]:
    """The first step of the actor, in the third iteration, is left out and its batch kept for cli/replay_batch.py."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rlvla.trainer.updater.aggregate_loss", lambda loss, *_, **__: loss.sum() * float("nan"))
        # The patched function is asked for the entropy; without a first evaluation the only one is the best.
        yield [*words, "--entropy_loss_coef", "0.01", "--no-val_before_train"]


@contextmanager
def as_it_is(words: list[str]) -> Iterator[list[str]]:
    yield words


# A word of the command -> under which circumstance it is run.
CIRCUMSTANCES = {"--vlm_url": a_judge, "runs/lift/ppo": a_gradient_of_nan}


def tensorboard(words: list[str], folder: Path) -> None:
    """Starts it, reads a scalar through the page's own interface, ends it."""
    command = [sys.executable, "-m", "tensorboard.main", *words[1:], "--port", "0"]
    printed = folder / "tensorboard.log"
    with printed.open("w") as log, subprocess.Popen(command, cwd=folder, stderr=log) as server:
        try:
            url = None
            ends = time.monotonic() + 300
            while url is None and time.monotonic() < ends and server.poll() is None:
                time.sleep(0.2)
                url = re.search(r"http://\S+/", printed.read_text())
            assert url, printed.read_text()
            tags: dict = {}
            while not tags and time.monotonic() < ends:
                with urllib.request.urlopen(url[0].rstrip("/") + "/data/plugin/scalars/tags", timeout=60) as answer:
                    tags = json.load(answer)
                time.sleep(0.2)
            assert any("rollout/success_at_end" in found for found in tags.values()), tags
        finally:
            server.terminate()


# ---------------------------------------------------------------------------------------------------------- execution
def run(words: list[str], folder: Path) -> None:
    """Execute a command of the documentation in a folder, cut down."""
    if words[0] == "tensorboard":
        return tensorboard(words, folder)
    if words[:2] == ["python", "-m"]:
        return run_process([sys.executable, *words[1:]], folder)
    at = next(i for i, word in enumerate(words) if word.endswith(".py"))
    room, name = Path(words[at]).parts[0], Path(words[at]).stem
    flags = words[at + 1 :]
    cut_down = [more for word in (name, *flags) for more in shlex.split(SMALLER.get(word, ""))]
    builds_tiny = name in ("train_sft_vla", "train_rm_vla") and "compact" not in flags
    flags = [*flags, *cut_down, *(shlex.split(TINY) if builds_tiny else [])]
    assert room in ("cli", "benchmarks"), words
    main = importlib.import_module(f"{room}.{name}").main
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for name, value in (word.split("=", 1) for word in words[:at] if "=" in word):
            patch.setenv(name, value)
        patch.setattr(sys, "argv", [words[at], *flags])  # it is written into config.yaml
        main(flags) if room == "cli" else main()
    return None


def run_process(command: list[str], folder: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]


def reason_not_to_run(words: list[str]) -> str | None:
    command = shlex.join(words)
    return next((reason for start, reason in NOT_RUN.items() if f"{command} ".startswith(f"{start} ")), None)


def test_what_is_not_run_still_stands_in_the_documentation() -> None:
    found = [words for page in PAGES for words in shell_commands(page.read_text(encoding="utf-8"))]
    commands = [f"{shlex.join(words)} " for words in found]
    lost = [start for start in NOT_RUN if not any(command.startswith(f"{start} ") for command in commands)]
    assert not lost, "no longer documented"
    assert not set(GIVEN) - {str(page.relative_to(ROOT)) for page in PAGES}, "pages without commands"
    run_by_a_test = len(found) - sum(reason_not_to_run(words) is not None for words in found)
    assert run_by_a_test > 40


@pytest.mark.slow
@pytest.mark.usefixtures("own_suites")
@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, id=name, marks=() if name in OFTEN else pytest.mark.nightly)
        for page in PAGES
        for name in [str(page.relative_to(ROOT))]
    ],
)
def test_commands_run(page: Path, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    text = page.read_text(encoding="utf-8")
    commands = [words for words in shell_commands(text) if reason_not_to_run(words) is None]
    for block in blocks(text, "python"):
        if title := re.match(r"# (\w+\.py)\n", block):
            (tmp_path / title[1]).write_text(block, encoding="utf-8")
    for provide in GIVEN.get(str(page.relative_to(ROOT)), []):
        provide(tmp_path, request)
    for words in commands:
        begun = time.monotonic()
        circumstance = next((found for mark, found in CIRCUMSTANCES.items() if mark in words), as_it_is)
        try:
            with circumstance(words) as changed:
                run(changed, tmp_path)
        except SystemExit as stop:
            if stop.code:
                pytest.fail(f"exit status {stop.code}: {shlex.join(words)}")
        print(f"{time.monotonic() - begun:.1f} s: {shlex.join(words)}")
