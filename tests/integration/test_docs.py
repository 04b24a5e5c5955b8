"""What the documentation says exists: commands with their flags, links, files, names, error messages."""

from __future__ import annotations

import argparse
import ast
import importlib
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import h5py
import pytest

from tests.support.documentation import DOCUMENTS, ROOT, blocks, shell_commands, without_blocks

COMMANDS = (
    *("collect_demos", "convert_demos", "train_sft_vla", "train_ppo_vla", "eval_vla"),
    *("draw_reward_machine", "score_episodes", "inspect_vla", "train_rm_vla", "train_sac_vla", "replay_batch"),
    *("check_env", "check_demos", "run_recipe", "export_policy", "new_env", "push_to_hub"),
    *("compare_runs", "tune_sft_vla", "dagger_vla", "view_data", "serve_vla", "teleoperate", "train_value_vla"),
    "recap_vla",
)
# Flags that belong to other programs: the deepspeed launcher, TensorBoard, pytest, Ray.
LAUNCHER_FLAGS = {"--num_accelerators", "--master_port"}
OTHER_FLAGS = LAUNCHER_FLAGS | {
    "--hostfile",
    "--master_addr",
    "--log_level",
    "--no_ssh",
    "--no_ssh_check",
    "--ssh_port",
    "--node_rank",
    "--help",
    "--module",
    "--logdir",
    "--flag",
    "--no-flag",
    "--nightly",
    "--rename_map",
    "--no-long_ppo",
    "--seeds",
    "--task",
    "--tasks",
    "--kills",
    "--script",
    "--ways",
    "--show",
    "--skip_alone",
    "--out",
    *("--minutes", "--rehearse", "--table", "--states"),
    *("--assets", "--nodes"),
    *("--head", "--port", "--address", "--disable-usage-stats", "--include-dashboard", "--num-cpus", "--generate"),
    "--object-store-memory",
}
# Pieces of messages that are not ours, or too short to be looked up.
SHORTEST_PIECE = 6

per_document = pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))


def parser_of(command: str) -> argparse.ArgumentParser:
    return importlib.import_module(f"cli.{command}").build_parser()


def parse(script: str, flags: list[str]) -> None:
    """Parse the flags as the command would; a launcher hands further flags on to its last command."""
    if script.endswith(".sh"):
        content = (ROOT / script).read_text(encoding="utf-8")
        inner = re.findall(r"cli/(\w+)\.py", content)
        if not flags or (not inner and all(flag in content.split() for flag in flags)):
            return
        assert inner and '"$@"' in content, f"{script} takes no flags"
        name = "train_ppo_vla" if inner[-1] == "run_recipe" else inner[-1]  # whose stage `rl` they are for
        script = f"cli/{name}.py"
    if "--config" in flags:  # a file that an earlier command of the page leaves behind
        at = flags.index("--config")
        assert flags[at + 1].endswith(".yaml")
        flags = flags[:at] + flags[at + 2 :]
    if script.startswith("cli/"):
        parser_of(Path(script).stem).parse_args(flags)


def check_command(words: list[str]) -> None:
    """One command of the documentation: known program, existing script, flags that parse."""
    places = [i for i, word in enumerate(words) if re.fullmatch(r"[\w./]+\.(py|sh)", word) and "/" in word]
    if not places:
        return
    script, flags = words[places[0]], words[places[0] + 1 :]
    before = words[: places[0]]
    assert (ROOT / script).is_file(), f"{script} does not exist"
    if before[0] == "deepspeed":
        assert before[1] == "-q", f"{words}: the launcher would begin with a screen of its own"
        assert set(before[2::2]) <= LAUNCHER_FLAGS and all(value.isdigit() for value in before[3::2]), words
    else:
        assert before in (["python"], ["bash"], ["source"]), words
    if script != "examples/scripts/test.sh":  # its arguments are pytest's
        parse(script, flags)


def test_the_check_of_commands_sees_mistakes(capsys: pytest.CaptureFixture) -> None:
    for command in (
        "python cli/eval_vla.py --pretrian x",
        "python cli/eval_vla.py --eval_protocol heldin",
        "deepspeed -q --num_accelerators 2 cli/train_sft_vla.py --train_batch_size many",
        "bash examples/scripts/toy_reach.sh --rollout_batch 3",
    ):
        with pytest.raises(SystemExit):
            check_command(shlex.split(command))
    for command in (
        "python cli/nothing.py",
        "deepspeed -q --ranks 2 cli/eval_vla.py",
        "deepspeed --num_accelerators 2 cli/eval_vla.py",
        "bash examples/scripts/no.sh",
    ):
        with pytest.raises(AssertionError):
            check_command(shlex.split(command))
    capsys.readouterr()


@per_document
def test_commands_parse(path: Path, capsys: pytest.CaptureFixture) -> None:
    for words in shell_commands(path.read_text(encoding="utf-8")):
        try:
            check_command(words)
        except SystemExit:
            pytest.fail(f"{shlex.join(words)}\n{capsys.readouterr().err}")


def test_commands_are_found() -> None:
    """Blocks in lists and continued lines are not overlooked."""
    found = [words for path in DOCUMENTS for words in shell_commands(path.read_text(encoding="utf-8"))]
    used = {Path(word).stem for words in found for word in words if word.startswith("cli/")}
    assert used == set(COMMANDS)


@per_document
def test_named_flags_exist(path: Path) -> None:
    known = {flag for command in COMMANDS for action in parser_of(command)._actions for flag in action.option_strings}
    text = path.read_text(encoding="utf-8")
    named = set(re.findall(r"(?<![\w-])--[a-z][\w-]*", without_blocks(text) + "\n".join(blocks(text, "text"))))
    assert named <= known | OTHER_FLAGS, sorted(named - known - OTHER_FLAGS)


def anchors(path: Path) -> set[str]:
    """Anchors of the headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", without_blocks(path.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in headings}


@per_document
def test_links_resolve(path: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", without_blocks(path.read_text(encoding="utf-8"))):
        if re.match(r"[a-z]+:", target):
            continue
        file, _, anchor = target.partition("#")
        linked = (path.parent / file).resolve() if file else path
        assert linked.exists(), f"{target} leads nowhere"
        if anchor:
            assert anchor in anchors(linked), f"{target}: {linked.name} has {sorted(anchors(linked))}"


@per_document
def test_named_files_exist(path: Path) -> None:
    named = re.findall(r"(?<![\w/])(?:cli|rlvla|examples|benchmarks|tests|docs)/[\w./-]*\w", path.read_text())
    named = [name for name in named if not re.search(r"-v\d+$", name)]  # ids of Gymnasium
    missing = [name for name in named if not (ROOT / name).exists() and not list(ROOT.glob(f"{name}.*"))]
    assert not missing, missing


@per_document
def test_named_python_objects_exist(path: Path) -> None:
    for name in set(re.findall(r"\brlvla(?:\.\w+)+\b(?!\w*\.py)", path.read_text(encoding="utf-8"))):
        parts = name.split(".")
        for cut in range(len(parts), 0, -1):
            try:
                target = importlib.import_module(".".join(parts[:cut]))
            except ModuleNotFoundError:
                continue
            for attribute in parts[cut:]:
                assert hasattr(target, attribute), f"{name} does not exist"
                target = getattr(target, attribute)
            break


def string_pieces() -> str:
    """Every string literal of the package and the commands; what is interpolated separates pieces."""
    pieces = []
    for path in [*(ROOT / "rlvla").rglob("*.py"), *(ROOT / "cli").glob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                pieces.append(node.value)
    return "\0".join(pieces)


def test_messages_in_troubleshooting_are_those_of_the_code() -> None:
    """A message is bold code; "…" stands for what is filled in, and a flag may be filled in as well."""
    text = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    messages = [m for m, rest in re.findall(r"^\*\*`(.+)`.*?\*\*(.*)$", text, re.MULTILINE) if "(from " not in rest]
    assert len(messages) > 25
    known = string_pieces()
    for message in messages:
        pieces = [piece.strip(" :") for piece in message.split("…")]
        pieces = [piece for piece in pieces if len(piece) >= SHORTEST_PIECE and not re.fullmatch(r"--\w+", piece)]
        assert pieces, message
        lost = [piece for piece in pieces if piece not in known]
        assert not lost, f"{message}: the code does not say {lost}"


def test_every_estimator_and_loss_has_a_page_that_the_index_links() -> None:
    from rlvla.algorithms import list_advantage_estimators, list_policy_losses

    folder = ROOT / "docs" / "algorithms"
    index = (folder / "index.md").read_text(encoding="utf-8")
    pages = [f"{name}.md" for name in list_advantage_estimators()]
    pages += [f"loss_{name}.md" for name in list_policy_losses()]
    for page in pages:
        if "test_" not in page:  # registered by another test of the session
            assert (folder / page).is_file(), f"{page} is missing"
            assert f"]({page})" in index, f"the index does not link {page}"


def test_the_example_loss_is_selectable_and_runs(tmp_path: Path) -> None:
    (block,) = blocks((ROOT / "docs" / "algorithms" / "index.md").read_text(encoding="utf-8"), "python")
    module = tmp_path / "my_loss.py"
    module.write_text(block, encoding="utf-8")
    code = f"""
import torch
from cli.train_ppo_vla import build_parser
from rlvla.algorithms import get_policy_loss
from rlvla.commands.custom_modules import parse_command_line
flags = parse_command_line(build_parser, ["--custom_module", {str(module)!r}, "--policy_loss", "squared_ratio"])
assert "squared_ratio" in build_parser().format_help() and flags.policy_loss == "squared_ratio"
one, mask = torch.ones(2, 3), torch.ones(2, 3, dtype=torch.bool)
assert float(get_policy_loss("squared_ratio")(one, one, 2 * one, mask, num_tokens=12)[0]) == -1.0
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", ["extending.md"])
def test_examples_in_python_run(name: str, tmp_path: Path) -> None:
    for number, block in enumerate(blocks((ROOT / "docs" / name).read_text(encoding="utf-8"), "python")):
        script = tmp_path / f"example_{number}.py"
        script.write_text(block, encoding="utf-8")
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        done = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("tested", ["examples/plugins/filtered_bc.py", "examples/plugins/bf16_rollouts.py"])
def test_the_examples_are_those_that_are_tested(tested: str) -> None:
    name = Path(tested).name
    examples = blocks((ROOT / "docs" / "extending.md").read_text(encoding="utf-8"), "python")
    (shown,) = [block for block in examples if block.startswith(f"# {name}\n")]
    assert (ROOT / tested).read_text(encoding="utf-8").endswith(shown.removeprefix(f"# {name}\n"))


def test_the_example_environment_keeps_the_contract(tmp_path: Path) -> None:
    pages = [ROOT / "docs" / "environments" / f"{name}.md" for name in ("index", "own")]
    text = "\n".join(page.read_text(encoding="utf-8") for page in pages)
    for block in blocks(text, "python"):
        title = re.match(r"# (\w+\.py)\n", block)
        (tmp_path / (title[1] if title else "first_steps.py")).write_text(block, encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    class_of_contract = "from rlvla.envs.testing import EnvContract\nimport button_suite\n"
    (tmp_path / "test_button_suite.py").write_text(
        class_of_contract + "class TestButton(EnvContract):\n    suite = 'button'\n", encoding="utf-8"
    )
    check, collect, _ = [words for words in shell_commands(text) if "slider_suite.py" in words]
    check[1], collect[1] = str(ROOT / check[1]), str(ROOT / collect[1])
    for words in (
        ["first_steps.py"],
        [*check[1:], "--goal_radius", "0.2"],  # the flag that the suite brings
        [*collect[1:], "--goal_radius", "0.2"],
        ["-m", "pytest", "-q", "-p", "no:cacheprovider"],
    ):
        done = subprocess.run(
            [sys.executable, *words], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
    assert (tmp_path / "slider.png").is_file()
    with h5py.File(tmp_path / "runs" / "slider" / "demos" / "demos.hdf5") as file:
        assert json.loads(file["data"].attrs["env_args"])["goal_radius"] == 0.2
