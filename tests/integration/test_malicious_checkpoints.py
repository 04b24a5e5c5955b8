"""Each pickle of a training checkpoint, a policy folder and a left-out batch, replaced by one that calls code."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from cli.eval_vla import main as evaluate
from cli.replay_batch import main as replay
from rlvla.checkpoints.training import CheckpointError, load_checkpoint, save_checkpoint
from rlvla.models.families import check_checkpoint
from rlvla.models.pi0.config import PALIGEMMA
from rlvla.models.smolvla.tiny import build_tiny_smolvla
from rlvla.models.vla.checkpoint_files import HEAD_PATTERNS
from rlvla.utils.deepspeed.config import StrategyConfig
from rlvla.utils.deepspeed.engine import Engine
from rlvla.utils.deepspeed.strategy import DeepspeedStrategy
from rlvla.utils.errors import ConfigError
from tests.support.checkpoints import save, trained_engine
from tests.support.malice import payloads, sign
from tests.support.tiny_pi0 import build_tiny_pi0

# DeepSpeed's files have other names and contents under each.
STRATEGIES = {
    "ZeRO-0": StrategyConfig(),
    "ZeRO-1": StrategyConfig(zero_stage=1),
    "ZeRO-2": StrategyConfig(zero_stage=2),
    "bf16": StrategyConfig(bf16=True),
}
FORMS = ("os.system", "beside tensors", "in a sample", "the old format", "a bare pickle 4")


@pytest.fixture(scope="module", params=STRATEGIES)
def written(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Engine, DeepspeedStrategy]:
    """An intact checkpoint, an engine that can read it, and its strategy."""
    strategy = DeepspeedStrategy(STRATEGIES[request.param])
    engine, folder = trained_engine(strategy, 0), tmp_path_factory.mktemp("written")
    save(strategy, folder, 1, engine)
    return folder, engine, strategy


def of_another_world(checkpoint: Path) -> None:
    """As if two ranks had written it, so that it is converted on loading."""
    state = checkpoint / "trainer.json"
    state.write_text(state.read_text().replace('"world_size": 1', '"world_size": 2'))
    shutil.copy(checkpoint / "rank0.pt", checkpoint / "rank1.pt")


@pytest.mark.parametrize("converted", [False, True], ids=["same ranks", "converted"])
def test_a_checkpoint_runs_nothing_and_the_file_is_named(written: tuple, tmp_path: Path, converted: bool) -> None:
    intact, engine, strategy = written
    mark, tries = tmp_path / "mark", 0
    names = [str(path.relative_to(intact)) for path in sorted(intact.rglob("*.pt"))]
    assert {"rank0.pt", "tensors.pt"} < {Path(name).name for name in names} and len(names) >= 3
    for name in names:
        for form in FORMS:
            folder = tmp_path / "checkpoints"
            shutil.copytree(intact, folder)
            payloads(mark)[form](folder / name)
            if converted:
                of_another_world(folder / "iteration_000001")
            sign(folder / "iteration_000001")
            before = [p.clone() for p in engine.module.parameters()]
            with pytest.raises(ConfigError) as refused:
                load_checkpoint(folder, {"net": engine}, strategy)
            (problem,) = refused.value.problems
            assert (problem.flag, problem.reason) == ("load_checkpoint", "invalid_file")
            assert str(folder / name) in problem and "\n" not in problem.text
            assert not mark.exists(), (name, form)
            assert all(torch.equal(a, b) for a, b in zip(before, engine.module.parameters())), "nothing was read yet"
            assert (folder / "iteration_000001").is_dir(), "it is left as it is"
            shutil.rmtree(folder)
            tries += 1
    assert tries == len(names) * len(FORMS)


def test_deepspeed_itself_runs_nothing(written: tuple, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check before loading is one barrier; loading and converting are another, should a file change in between."""
    intact, engine, _ = written
    monkeypatch.setattr("rlvla.checkpoints.training._refused_file", lambda _: None)
    mark = tmp_path / "mark"
    for path in sorted((intact / "iteration_000001" / "net").glob("*.pt")):
        folder = tmp_path / "copy"
        shutil.copytree(intact / "iteration_000001", folder)
        payloads(mark)["beside tensors"](folder / "net" / path.name)
        readers = [lambda f=folder: engine.load(f, "net")]
        if engine.config.engine_stage:
            readers.append(lambda f=folder: engine.convert(f / "net", f / "converted"))
        for read in readers:
            with pytest.raises(Exception, match="os.system|posix|[Ww]eights"):
                read()
            assert not mark.exists(), path.name
        shutil.rmtree(folder)


def test_an_intact_checkpoint_is_still_read(written: tuple) -> None:
    intact, engine, strategy = written
    assert load_checkpoint(intact, {"net": engine}, strategy)["iteration"] == 1


class OfALearner:
    """Stands for the state of a learner in a custom module."""


def test_state_that_could_not_be_read_again_is_refused_when_it_is_saved(tmp_path: Path) -> None:
    strategy = DeepspeedStrategy(StrategyConfig())
    engines, state = {"net": trained_engine(strategy, 0)}, {"learner": OfALearner()}
    with pytest.raises(CheckpointError, match=r"OfALearner.*untouched\. See docs/security.md"):
        save_checkpoint(tmp_path, 1, engines, {"totals": {}}, strategy, 2, state)
    with torch.serialization.safe_globals([OfALearner]):
        save_checkpoint(tmp_path, 1, engines, {"totals": {}}, strategy, 2, state)
        read = load_checkpoint(tmp_path, engines, strategy)
    assert isinstance(read["rank_state"]["learner"], OfALearner)


def test_separate_files_of_a_policy_run_nothing(
    policy_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    mark = tmp_path / "mark"
    files = [
        "proprio_projector--1_checkpoint.pt",
        "vision_backbone--1_checkpoint.pt",
        HEAD_PATTERNS[0].replace("*", "1"),
    ]
    for name in files:
        folder = tmp_path / "policy"
        shutil.copytree(policy_folder, folder)
        payloads(mark)["beside tensors"](folder / name)
        variant = ["--model_variant", "oft_regression"] if name.startswith("action_head") else []
        config = folder / "config.json"
        config.write_text(config.read_text().replace('"model_variant": "oft"', '"unused": "oft"'))
        with pytest.raises(SystemExit) as ended:
            evaluate(["--pretrain", str(folder), "--eval_episodes", "2", *variant])
        said = capsys.readouterr().err
        assert ended.value.code == 2 and name in said and "posix.system" in said
        assert not mark.exists(), name
        shutil.rmtree(folder)


@pytest.mark.parametrize("family", ["smolvla", "pi0"])
def test_a_tokenizer_runs_no_code(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`auto_map` of a tokenizer, with a class and a model that transformers does not know; who is asked says yes."""
    numbers = {"mean": [0.0, 0.0], "std": [1.0, 1.0]}
    build, inner = (build_tiny_smolvla, "vlm") if family == "smolvla" else (build_tiny_pi0, PALIGEMMA)
    statistics = {"observation.state": numbers, "action": numbers}
    folder, mark = tmp_path / "policy", tmp_path / "mark"
    build(folder, sentences=["reach"], statistics=statistics, state_dim=2, action_dim=2)
    evil = shutil.copytree(folder / inner, folder / "evil")
    (evil / "code.py").write_text(f"open({str(mark)!r}, 'w')\n")
    model = {"model_type": "evil", "auto_map": {"AutoConfig": "code.Config"}}
    (evil / "config.json").write_text(json.dumps(model))
    settings = json.loads((evil / "tokenizer_config.json").read_text())
    settings |= {"tokenizer_class": "Evil", "auto_map": {"AutoTokenizer": ["code.Evil", "code.Evil"]}}
    (evil / "tokenizer_config.json").write_text(json.dumps(settings))
    pipeline = json.loads((folder / "policy_preprocessor.json").read_text())
    for step in pipeline["steps"]:
        if step["registry_name"] == "tokenizer_processor":
            step["config"]["tokenizer_name"] = "evil"
    (folder / "policy_preprocessor.json").write_text(json.dumps(pipeline))
    asked: list[str] = []
    monkeypatch.setattr("builtins.input", lambda *words: asked.append(str(words)) or "y")
    with pytest.raises(ConfigError) as refused:
        check_checkpoint(folder)
    assert not mark.exists() and not asked
    (problem,) = refused.value.problems
    assert problem.reason == "invalid_file" and str(evil) in problem and "\n" not in problem.text


def test_a_batch_of_a_left_out_step_runs_nothing(
    policy_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    mark, batch = tmp_path / "mark", tmp_path / "batch.pt"
    for form in FORMS:
        payloads(mark)[form](batch)
        with pytest.raises(SystemExit) as ended:
            replay(["--batch", str(batch), "--pretrain", str(policy_folder)])
        assert ended.value.code == 2 and str(batch) in capsys.readouterr().err
        assert not mark.exists(), form
