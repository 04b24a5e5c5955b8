"""What is uploaded, what never is, and how: against a server that speaks the Hub's interface."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub.constants as hub_constants
import pytest

from cli.push_to_hub import main
from rlvla.commands.push_to_hub import select
from rlvla.utils.errors import ConfigError
from tests.support.hub_server import Hub, hub_server
from tests.support.shared_policies import evaluation, make_run

OF_THE_POLICY = ["README.md", "config.json", "eval.json", "model.safetensors", "rlvla_environment.json"]
OTHERS = {
    "optimizer.pt": "training state",
    "optimizer_state.safetensors": "training state",
    "training_state/scheduler_state.json": "training state",
    "checkpoints/iteration_1/weights.safetensors": "training state",
    "mp_rank_00_model_states.pt": "not a policy file",
    "events.out.tfevents.1": "not a policy file",
    "eval_1.json": "an earlier evaluation",
    "eval.md": "not a policy file",
    ".git/config.json": "hidden",
    "modeling.py": "not a policy file",
    "notes.txt": "not a policy file",
    "wandb-settings.json": "not a policy file",
    "train_config.json": "not a policy file",
    "vision/secrets.json": "not a policy file",
}
PARTS = [
    "action_head--50000_checkpoint.pt",
    "lora_adapter/adapter_config.json",
    "lora_adapter/adapter_model.safetensors",
]
TEXTS = [
    *("generation_config.json", "preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json"),
    *("tokenizer.model", "special_tokens_map.json", "chat_template.jinja", "vision/merges.txt", "vision/config.json"),
    *("policy_preprocessor.json", "policy_postprocessor.json", "rlvla_policy.json", "sizes.json"),
    *("dataset_statistics.json", "model.safetensors.index.json"),
]


@pytest.fixture
def policy(tmp_path: Path) -> Path:
    folder = make_run(tmp_path / "ppo")
    (folder / "eval.json").write_text(json.dumps(evaluation(18, str(folder))))
    return folder


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setattr(hub_constants, "HF_HUB_DISABLE_XET", True)
    with hub_server() as server:
        monkeypatch.setattr(hub_constants, "ENDPOINT", server.url)
        yield server


def fails(capsys: pytest.CaptureFixture, *words: object, status: int = 2) -> str:
    with pytest.raises(SystemExit) as ended:
        main([str(word) for word in words])
    assert ended.value.code == status
    return capsys.readouterr().err


def add(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"{}")


def test_only_the_files_of_a_policy_are_chosen(policy: Path) -> None:
    add(policy, *OTHERS, *PARTS, *TEXTS, "README.md")
    chosen = select(policy, "card")
    assert sorted(u.name for u in chosen.uploads) == sorted([*OF_THE_POLICY, *PARTS, *TEXTS])
    assert dict(chosen.left) == OTHERS
    (card,) = [upload for upload in chosen.uploads if upload.name == "README.md"]
    assert card.content == b"card", "not that of the folder, which may be the card of what training started from"


def test_absolute_paths_stay_here(policy: Path, tmp_path: Path) -> None:
    (policy / "tokenizer.json").write_text('{"model": {"vocab": {"/usr/bin/env": 7}}}')
    (policy / "tokenizer_config.json").write_text(
        json.dumps({"name_or_path": "/home/some one/open vla", "chat": "a/b"})
    )
    chosen = {upload.name: upload for upload in select(policy, "card").uploads}
    assert chosen["tokenizer.json"].content == policy / "tokenizer.json", "words are no paths"
    assert json.loads(chosen["tokenizer_config.json"].content) == {"name_or_path": "open vla", "chat": "a/b"}
    assert json.loads(chosen["config.json"].content) == {"model_type": "compact", "_name_or_path": "start"}
    assert json.loads(chosen["eval.json"].content)["policy"] == "policy"
    for upload in chosen.values():
        content = upload.content if isinstance(upload.content, bytes) else upload.content.read_bytes()
        assert str(tmp_path).encode() not in content, upload.name


@pytest.mark.parametrize("name", ["/models/SmolVLM2", "../SmolVLM2"])
def test_a_policy_that_needs_a_model_beside_it_is_not_uploaded(policy: Path, name: str) -> None:
    content = json.loads((policy / "config.json").read_text())
    (policy / "config.json").write_text(json.dumps(content | {"vlm_model_name": name}))
    with pytest.raises(ConfigError, match=f"names {name}, which is not uploaded"):
        select(policy, "card")
    (policy / "config.json").write_text(json.dumps(content | {"vlm_model_name": "HuggingFaceTB/SmolVLM2"}))
    assert select(policy, "card").uploads


def test_a_dry_run_lists_all_of_it_and_uploads_nothing(
    policy: Path, hub: Hub, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HF_TOKEN")
    add(policy, "optimizer.pt")
    before = {path: path.read_bytes() for path in policy.rglob("*")}
    main([str(policy.parent), "--repo_id", "me/toy", "--dry_run"])  # the folder of the run stands for its policy
    said = capsys.readouterr().out
    listed = said[said.index("README.md  ") :].splitlines()
    assert [line.split("  ")[0] for line in listed[:-3]] == OF_THE_POLICY
    assert listed[1].endswith("B  (paths and addresses shortened)") and listed[3] == "model.safetensors  3.0 kB"
    assert listed[-3:] == [
        "not uploaded: optimizer.pt  (training state)",
        "weights that are in these folders of the repository already would be removed: ., lora_adapter",
        "a private repository: me/toy; nothing was uploaded",
    ]
    assert "\n---\nlibrary_name: rlvla\n" in f"\n{said}" and "90.0%" in said
    assert not hub.repos and {path: path.read_bytes() for path in policy.rglob("*")} == before


def test_a_private_repository_receives_the_files_in_one_commit(
    policy: Path, hub: Hub, capsys: pytest.CaptureFixture
) -> None:
    main([str(policy), "--repo_id", "me/toy", "--license", "mit"])
    *listed, last = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in listed] == OF_THE_POLICY and last == f"uploaded: {hub.url}/me/toy"
    assert hub.repos == {"me/toy": True} and hub.tokens == {"Bearer hf_secret"} and len(hub.commits) == 1
    files = hub.files["me/toy"]
    assert sorted(files) == OF_THE_POLICY
    assert files["model.safetensors"] == (policy / "model.safetensors").read_bytes()
    assert files["README.md"].decode().startswith("---\n") and b"license: mit" in files["README.md"]


def test_a_second_upload_leaves_no_old_weights(policy: Path, hub: Hub, capsys: pytest.CaptureFixture) -> None:
    hub.make("me/toy", private=True)
    old = ["lora_adapter/adapter_model.safetensors", "model-1-of-2.safetensors", "model.safetensors.index.json"]
    others = ["notes.txt", "seed_2/model.safetensors"]
    hub.files["me/toy"] = dict.fromkeys([*old, *others], b"")
    main([str(policy), "--repo_id", "me/toy"])
    assert sorted(hub.files["me/toy"]) == sorted([*OF_THE_POLICY, *others]), "what is elsewhere is not read with it"
    said = capsys.readouterr().out.splitlines()
    assert said[len(OF_THE_POLICY) : -1] == [
        f"removing from me/toy: {name}  (weights of an earlier upload)" for name in old
    ]


def test_what_everybody_can_read_must_be_meant(policy: Path, hub: Hub, capsys: pytest.CaptureFixture) -> None:
    hub.make("me/toy", private=False)
    assert "everybody can read it; give --public" in fails(capsys, policy, "--repo_id", "me/toy")
    assert not hub.files["me/toy"]
    main([str(policy), "--repo_id", "me/toy", "--public"])
    main([str(policy), "--repo_id", "me/new", "--public"])
    assert hub.repos == {"me/toy": False, "me/new": False} and sorted(hub.files["me/toy"]) == OF_THE_POLICY


def test_what_the_server_says_is_one_line(policy: Path, hub: Hub, capsys: pytest.CaptureFixture) -> None:
    hub.refuse = 403, "Storage limit reached"
    said = fails(capsys, policy, "--repo_id", "me/toy", status=1)
    assert "the Hub cannot be written to: " in said and "Storage limit reached" in said and "Traceback" not in said


def test_a_hub_that_cannot_be_reached(
    policy: Path, hub: Hub, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub_constants, "ENDPOINT", "http://127.0.0.1:9")
    said = fails(capsys, policy, "--repo_id", "me/toy", status=1)
    assert "the Hub cannot be written to: " in said and "Traceback" not in said


def test_all_mistakes_are_said_before_anything_is_sent(
    policy: Path, hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr(hub_constants, "HF_TOKEN_PATH", str(tmp_path / "none"))
    said = fails(capsys, tmp_path / "nothing")
    assert "name the repository with --repo_id OWNER/NAME" in said and "there is no folder" in said
    for repo in ("toy", "me/t oy", "me/toy/policy"):
        assert f"--repo_id {repo}: give OWNER/NAME" in fails(capsys, policy, "--repo_id", repo)
    assert "there is no token" in fails(capsys, policy, "--repo_id", "me/toy")
    card = tmp_path / "card.md"
    flags = [policy, "--repo_id", "me/toy", "--dry_run", "--card", card]
    assert f"--card {card} cannot be read" in fails(capsys, *flags)
    card.write_text("# Toy\ntrained on /home/me/demos/lift.hdf5\n")
    assert "line 2 names a place on this machine" in fails(capsys, *flags)
    (policy / "preprocessor_config.json").write_text("{")
    assert "preprocessor_config.json is damaged" in fails(capsys, *flags[:-2])
    (policy / "config.json").write_text('{"model_type": "dsrl", "base": ["../base", "/home/me/base"]}')
    assert "acts with a policy in another folder (../base or /home/me/base)" in fails(capsys, *flags[:-2])
    assert not hub.repos


def test_a_card_of_ones_own(policy: Path, hub: Hub, tmp_path: Path) -> None:
    (tmp_path / "card.md").write_text("# Toy\n")
    main([str(policy), "--repo_id", "me/toy", "--card", str(tmp_path / "card.md")])
    assert hub.files["me/toy"]["README.md"] == b"# Toy\n"


def test_a_policy_of_an_unknown_type_is_not_uploaded(policy: Path, capsys: pytest.CaptureFixture, hub: Hub) -> None:
    (policy / "config.json").write_text(json.dumps({"model_type": "x` <b>of nobody</b>"}))
    assert "of nobody" in fails(capsys, policy, "--repo_id", "me/toy")
    assert not hub.files
    own = Path(__file__).resolve().parents[2] / "support" / "own_policy.py"
    (policy / "config.json").write_text(json.dumps({"model_type": "test_mlp"}))
    main([str(policy), "--repo_id", "me/toy", "--dry_run", "--custom_module", str(own)])


def test_a_link_out_of_the_folder_is_not_uploaded(
    policy: Path, tmp_path: Path, capsys: pytest.CaptureFixture, hub: Hub
) -> None:
    (tmp_path / "id_rsa").write_text("private")
    (policy / "vocab.txt").symlink_to(tmp_path / "id_rsa")
    assert "outside of" in fails(capsys, policy, "--repo_id", "me/toy")
    assert not hub.files


def test_results_of_other_types_are_one_sentence(policy: Path, capsys: pytest.CaptureFixture, hub: Hub) -> None:
    content = json.loads((policy / "eval.json").read_text())
    content["results"][0]["success_at_end"]["low"] = "<b>high</b>"
    (policy / "eval.json").write_text(json.dumps(content))
    assert "hold values of other types" in fails(capsys, policy, "--repo_id", "me/toy")
