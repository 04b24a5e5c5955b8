"""Images are prepared once, on arrival; all stages of a run read the same pixels, bit for bit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from rlvla.data.demonstrations import Demonstrations
from rlvla.data.reward_model_rows import FrameRows
from rlvla.data.rows import DemonstrationRows
from rlvla.envs import list_tasks
from rlvla.envs.base import ChunkResult, Observation
from rlvla.experience import Experience, Sample
from rlvla.models.actor import Actor
from rlvla.models.value_models import Critic, RewardModel
from rlvla.models.vla.image_processing import center_crop, libero_image, to_pixel_values
from rlvla.models.vla.inputs import VLAInputs
from rlvla.models.vla.tiny import build_tiny
from rlvla.rewards import RewardPlan
from rlvla.rollout import Episode, EpisodeRequest

TREATMENTS = [
    {"image_preprocessing": "libero", "center_crop": True},
    {"image_preprocessing": "none", "center_crop": True},
    {"image_preprocessing": "libero", "center_crop": False},
    {"image_preprocessing": "none", "center_crop": False},
]
S, SIZE = 3, 48  # observations; the environment's images are larger than the network's


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny(
        tmp_path_factory.mktemp("images"),
        sentences=["go"],
        dataset_statistics={"x": {"action": {"q01": [-1.0] * 7, "q99": [1.0] * 7}}},
        image_size=32,
        num_images_in_input=2,
        action_chunk_len=1,
    )


@pytest.fixture(scope="module")
def shown() -> np.ndarray:
    """[S, 2, 48, 48, 3] as an environment renders them."""
    return np.random.default_rng(0).integers(0, 256, (S, 2, SIZE, SIZE, 3), dtype=np.uint8)


def treated(images: np.ndarray, settings: dict) -> np.ndarray:
    """Expected input of the network, from the preprocessing of the public checkpoints."""
    if settings["image_preprocessing"] == "libero":
        images = np.stack([[libero_image(image, 32) for image in row] for row in images])
    return center_crop(images, 0.9, 32) if settings["center_crop"] else images


def play(policy: Actor, images: np.ndarray, **options: bool) -> Sample:
    """An episode whose observations are these."""
    plan = RewardPlan({"success": 1.0})
    episode = Episode(EpisodeRequest("toy_reach", 0, 0, 0, "u"), list_tasks("toy_reach")[0], plan, policy, **options)
    episode.on_observation(Observation(images[0], None, "go"))
    for number, image in enumerate(images[1:], 2):
        prepared = episode.observation.images[None]
        decision = policy.act(prepared, None, ["go"], noise=episode.noise()[None], temperature=1.6)
        episode.on_decision(decision.actions[0], decision.log_probs[0], {k: v[0] for k, v in decision.trace.items()})
        nothing, over = np.zeros(1, bool), number == len(images)
        episode.on_chunk(ChunkResult(Observation(image, None, "go"), 1, np.zeros(1), nothing, False, over, False))
    return episode.to_sample()


def pixels_into(model: torch.nn.Module) -> list[torch.Tensor]:
    """Grows with each pass of the vision backbone."""
    pixels: list[torch.Tensor] = []
    model.vla.vision_backbone.register_forward_pre_hook(lambda _, inputs: pixels.append(inputs[0].detach().clone()))
    return pixels


def rows_of(images: torch.Tensor) -> Experience:
    n = len(images)
    return Experience(images=images, instructions=["go"] * n, trace={"tokens": torch.zeros(n, 7, dtype=torch.int64)})


@pytest.mark.parametrize("settings", TREATMENTS, ids=str)
def test_every_stage_sees_the_same_pixels(folder: Path, shown: np.ndarray, settings: dict) -> None:
    if settings == TREATMENTS[-1]:
        shown = np.ascontiguousarray(shown[..., :32, :32, :])  # nothing resizes: they have the network's size
    actor, critic = Actor.from_pretrained(folder, **settings).eval(), Critic.from_pretrained(folder, **settings)
    actor_pixels, critic_pixels = pixels_into(actor), pixels_into(critic)
    sample = play(actor, shown)  # rollout, a decision at a time
    prepared = torch.cat([sample.images, sample.last_images[None]])
    assert torch.equal(prepared, torch.from_numpy(treated(shown, settings)))
    actor.act(actor.prepare(shown, None)[0], None, ["go"] * S, noise=None)  # evaluation, in a batch
    batch = rows_of(prepared)
    with torch.no_grad():
        actor(**actor.score(batch, 1.6))  # old log-probs
    actor.train()(**actor.score(batch, 1.6))  # update
    critic.train()(**critic.score(batch))
    for row in range(S):  # each decision by itself, as in a batch of another size
        actor(**actor.score(batch.index(torch.tensor([row])), 1.6))
    expected = to_pixel_values(treated(shown, settings), actor.inputs.config)
    assert len(actor_pixels) == (S - 1) + 3 + S and len(critic_pixels) == 1
    assert torch.equal(torch.cat(actor_pixels[: S - 1]), expected[:-1])
    for pixels in [*actor_pixels[S - 1 : S + 2], torch.cat(actor_pixels[S + 2 :]), *critic_pixels]:
        assert torch.equal(pixels, expected)


@pytest.mark.parametrize("settings", TREATMENTS[:3], ids=str)
def test_rows_of_demonstrations_and_of_outcomes_are_prepared_like_observations(
    folder: Path, shown: np.ndarray, settings: dict
) -> None:
    actor = Actor.from_pretrained(folder, **settings)
    demos = Demonstrations(
        env_args={},
        statistics={},
        instructions=["go"],
        images=[shown],
        proprio=None,
        actions=[np.zeros((S, 7), np.float32)],
        success=[True],
        init_states=[(0, 0)],
    )
    wanted = torch.from_numpy(treated(shown, settings))
    rows = DemonstrationRows(demos, actor).take(np.arange(S))
    assert torch.equal(rows.images, wanted)
    model = RewardModel(actor.vla, actor.inputs)
    assert torch.equal(FrameRows.of(demos, [0], model).inputs.images, wanted)
    assert torch.equal(play(actor, shown).images, wanted[:-1])


@pytest.mark.parametrize("settings", TREATMENTS, ids=str)
def test_an_observation_is_prepared_once_however_often_it_is_used(
    folder: Path, shown: np.ndarray, settings: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = np.ascontiguousarray(shown[..., :32, :32, :])
    actor = Actor.from_pretrained(folder, **settings).eval()
    calls: list[tuple[int, ...]] = []
    original = VLAInputs.prepare
    monkeypatch.setattr(
        VLAInputs, "prepare", lambda self, images, state: calls.append(images.shape) or original(self, images, state)
    )
    sample = play(actor, shown)
    assert calls == [shown.shape[1:]] * S
    batch = rows_of(sample.images)
    with torch.no_grad():
        for _ in range(2):
            actor(**actor.score(batch, 1.6))
    assert len(calls) == S, "no network prepares again what a sample holds"


@pytest.mark.parametrize("settings", TREATMENTS, ids=str)
def test_raw_images_are_kept_on_request_and_differ(folder: Path, shown: np.ndarray, settings: dict) -> None:
    shown = np.ascontiguousarray(shown[..., :32, :32, :])
    actor = Actor.from_pretrained(folder, **settings).eval()
    assert play(actor, shown).observed_images is None
    kept = play(actor, shown, keep_observed=True)
    assert torch.equal(kept.env_images, torch.from_numpy(shown))
    assert (kept.observed_images is None) == (settings == TREATMENTS[-1]), "not twice where the policy sees just that"
