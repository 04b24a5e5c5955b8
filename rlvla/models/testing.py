"""The policy contract as tests, for the families that ship with rlvla and for custom ones.

Subclass `PolicyContract` in a test file and run it with pytest:

    import my_policy  # registers its family
    from rlvla.models.testing import PolicyContract

    class TestMyPolicy(PolicyContract):
        @pytest.fixture(scope="class")
        @classmethod
        def folder(cls, tmp_path_factory):
            return my_policy.write_new(tmp_path_factory.mktemp("policy") / "start")
"""
# ruff: noqa: D102 (the test names state the requirements)

from __future__ import annotations

import math
from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor

from rlvla.experience import Experience
from rlvla.models.config import ActorConfig
from rlvla.models.distributions import ActionDistribution
from rlvla.models.families import check_checkpoint
from rlvla.models.policy import Decision, parameters_of

_ROWS, _DRAWS = 6, 4000
_TEMPERATURE = 1.3
# Standard errors by which a Monte Carlo estimate may differ from the exact value.
_STANDARD_ERRORS = 5.0


class PolicyContract:
    """Tests of one checkpoint folder; override `folder` in a subclass whose name starts with `Test`.

    Attributes:
        config: adapters and memory options of the policy.
        value_head: load the policy with a value head.
        overrides: settings of a run that the folder does not record, see `PolicyFamily.check`.
        image_size: side of the test images in pixels if the policy takes any size.
        instructions: sentences of different lengths that the policy can read.
        tolerance: how far log-probs may differ between batch sizes (matrix products sum in a different order).
        files: glob patterns of files that a saved policy leaves out.
        unreached: patterns of names of trainable parameters that no decision uses, e.g. parts of a pretrained network
            after the layer whose output is used. A parameter that is used must not match.
    """

    config: ClassVar[ActorConfig] = ActorConfig()
    value_head: ClassVar[bool] = False
    overrides: ClassVar[Mapping[str, Any]] = {}
    image_size: ClassVar[int] = 32
    instructions: ClassVar[tuple[str, ...]] = ("reach the red disc", "reach the extraordinarily yellow disc")
    tolerance: ClassVar[float] = 2e-5
    files: ClassVar[tuple[str, ...]] = ()
    unreached: ClassVar[tuple[str, ...]] = ()

    @pytest.fixture(scope="class")
    @classmethod
    def folder(cls, tmp_path_factory: pytest.TempPathFactory) -> Path:
        """The checkpoint folder."""
        raise NotImplementedError("override the fixture `folder`")

    @pytest.fixture(scope="class")
    @classmethod
    def policy(cls, folder: Path) -> Any:
        """The policy of the folder, with adapters set to nonzero values so that they have an effect."""
        torch.manual_seed(0)
        checkpoint = check_checkpoint(folder, overrides=cls.overrides)
        policy: Any = checkpoint.load_policy(cls.config, value_head=cls.value_head).eval()
        with torch.no_grad():
            for name, parameter in policy.named_parameters():
                if "lora_B" in name:
                    parameter.normal_(0.0, 0.02)
        return policy

    def observations(self, policy: Any, count: int = _ROWS) -> tuple[np.ndarray, np.ndarray | None, list[str]]:
        """Raw images, proprio and instructions, as from an environment."""
        rng, spec = np.random.default_rng(0), policy.spec
        size = spec.image_size or self.image_size
        images = rng.integers(0, 256, (count, spec.cameras or 1, size, size, 3), dtype=np.uint8)
        proprio = rng.uniform(-1, 1, (count, spec.proprio_dim)).astype(np.float32) if spec.proprio_dim else None
        return images, proprio, [self.instructions[i % len(self.instructions)] for i in range(count)]

    def prepared(self, policy: Any, count: int = _ROWS) -> tuple[np.ndarray, np.ndarray | None, list[str]]:
        """The same observations after `prepare`."""
        images, proprio, instructions = self.observations(policy, count)
        return *policy.prepare(images, proprio), instructions

    def noise(self, policy: Any, count: int = _ROWS, seed: int = 1) -> np.ndarray:
        """Random numbers [B, *noise_shape]."""
        rng = np.random.default_rng(seed)
        return np.stack([policy.spec.draw(rng) for _ in range(count)])

    def decide(self, policy: Any, noise: np.ndarray | None, rows: slice = slice(None)) -> Decision:
        """Decisions for some rows of the observations."""
        images, proprio, instructions = self.prepared(policy)
        state = None if proprio is None else proprio[rows]
        return policy.act(images[rows], state, instructions[rows], noise=noise, temperature=_TEMPERATURE)

    def batch(self, policy: Any, trace: Mapping[str, np.ndarray]) -> Experience:
        """All observations with the decisions in `trace`."""
        images, proprio, instructions = self.prepared(policy)
        return Experience(
            images=torch.from_numpy(images),
            proprio=None if proprio is None else torch.from_numpy(proprio),
            instructions=instructions,
            trace={name: torch.from_numpy(np.array(value)) for name, value in trace.items()},
            action_mask=torch.ones(len(images), policy.spec.columns, dtype=torch.bool),
        )

    def log_probs(self, policy: Any, batch: Experience) -> Tensor:
        """Log-probs of a batch, [B, K], without gradients."""
        with torch.no_grad():
            return policy(**policy.score(batch, _TEMPERATURE), wants=("log_probs",))["log_probs"]

    def distribution(self, policy: Any) -> ActionDistribution:
        """The distribution for all observations; skips the test if it exists only given the decisions."""
        decision = self.decide(policy, None)
        with torch.no_grad():
            distribution = policy.distribution(self.batch(policy, decision.trace), _TEMPERATURE)
        if not hasattr(distribution, "parameters"):
            pytest.skip("the distribution of a column depends on the columns before it")
        return distribution

    def test_shapes_and_types(self, policy: Any) -> None:
        spec, decision = policy.spec, self.decide(policy, self.noise(policy))
        assert spec.columns % spec.action_chunk_len == 0
        assert decision.actions.shape == (_ROWS, spec.action_chunk_len, spec.action_dim)
        assert decision.actions.dtype == np.float32 and np.isfinite(decision.actions).all()
        assert decision.log_probs.shape == (_ROWS, spec.columns) and decision.log_probs.dtype == np.float32
        assert decision.trace and all(len(value) == _ROWS for value in decision.trace.values())
        assert policy.effective_columns.shape == (spec.columns,) and policy.effective_columns.dtype == torch.bool
        assert len(policy.normalized_dims) == spec.action_dim
        assert len(policy.row_tokens(list(self.instructions), spec.cameras or 1)) == len(self.instructions)

    def test_prepared_observations(self, policy: Any) -> None:
        images, proprio, _ = self.observations(policy)
        prepared, state = policy.prepare(images, proprio)
        one, state_of_one = policy.prepare(images[0], None if proprio is None else proprio[0])
        assert prepared.dtype == np.uint8 and prepared.shape[:2] == images.shape[:2] and prepared.shape[-1] == 3
        np.testing.assert_array_equal(prepared[0], one)
        assert (state is None) == (proprio is None)
        if state is not None and state_of_one is not None:
            assert state.dtype == np.float32
            np.testing.assert_array_equal(state[0], state_of_one)

    def test_log_probs_of_a_stored_trace_are_those_of_sampling(self, policy: Any) -> None:
        decision = self.decide(policy, self.noise(policy))
        log_probs = self.log_probs(policy, self.batch(policy, decision.trace)).numpy()
        np.testing.assert_allclose(log_probs, decision.log_probs, atol=self.tolerance)

    @pytest.mark.parametrize("size", [1, 2, 4])
    def test_the_ratio_is_one_for_every_batch_size_and_row_order(self, policy: Any, size: int) -> None:
        decision = self.decide(policy, self.noise(policy))
        batch = self.batch(policy, decision.trace)
        order = torch.randperm(_ROWS, generator=torch.Generator().manual_seed(0))
        log_probs = torch.cat([self.log_probs(policy, batch.index(rows)) for rows in order.split(size)])
        ratio = (log_probs - torch.from_numpy(decision.log_probs)[order]).exp()
        torch.testing.assert_close(ratio, torch.ones_like(ratio), atol=self.tolerance, rtol=0)

    def test_equal_noise_gives_equal_actions_whatever_the_batch(self, policy: Any) -> None:
        noise = self.noise(policy)
        together, again = self.decide(policy, noise), self.decide(policy, noise)
        np.testing.assert_array_equal(together.actions, again.actions)
        for row in range(_ROWS):
            rows = slice(row, row + 1)
            alone = self.decide(policy, noise[rows], rows)
            np.testing.assert_allclose(alone.actions, together.actions[rows], atol=self.tolerance)

    def test_greedy_is_deterministic_and_noise_is_not_ignored(self, policy: Any) -> None:
        np.testing.assert_array_equal(self.decide(policy, None).actions, self.decide(policy, None).actions)
        first, second = (self.decide(policy, self.noise(policy, seed=seed)).actions for seed in (1, 2))
        assert (first != second).any()

    def test_greedy_decisions_read_noise_if_the_policy_says_so(self, policy: Any) -> None:
        if not policy.spec.greedy_noise:
            pytest.skip("its greedy decisions read no random numbers")
        images, proprio, instructions = self.prepared(policy)

        def greedy(noise: np.ndarray) -> Decision:
            return policy.act(images, proprio, instructions, noise=noise, temperature=_TEMPERATURE, greedy=True)

        first, again, other = (greedy(self.noise(policy, seed=seed)) for seed in (1, 1, 2))
        np.testing.assert_array_equal(first.actions, again.actions)
        assert (first.actions != other.actions).any()
        scored = self.log_probs(policy, self.batch(policy, first.trace)).numpy()
        np.testing.assert_allclose(scored, first.log_probs, atol=self.tolerance)

    def test_denoising_from_chosen_noise_is_what_greedy_decisions_do(self, policy: Any) -> None:
        spec = policy.spec
        if not spec.start_shape or not spec.greedy_noise:
            pytest.skip("its actions are not denoised, or greedy ones start from 0")
        observed, noise = self.prepared(policy), self.noise(policy)
        start = noise[:, : math.prod(spec.start_shape)].reshape(_ROWS, *spec.start_shape)
        greedy = policy.act(*observed, noise=noise, temperature=_TEMPERATURE, greedy=True)
        with torch.no_grad():
            hidden = policy.encode(*observed)
            actions = policy.denoise(hidden, torch.from_numpy(start).float())
            summary = policy.summary(hidden)
        np.testing.assert_allclose(actions, greedy.actions, atol=self.tolerance)
        assert summary.shape == (_ROWS, spec.summary_dim) and summary.dtype == torch.float32
        assert bool((summary[0] != summary[1]).any())

    def test_saving_and_loading_lose_nothing(self, policy: Any, folder: Path, tmp_path: Path) -> None:
        policy.save_pretrained(tmp_path / "copy")
        kept = {path.name for path in folder.iterdir() if not any(path.match(pattern) for pattern in self.files)}
        assert kept <= {path.name for path in (tmp_path / "copy").iterdir()}
        copy = check_checkpoint(tmp_path / "copy", overrides=self.overrides).load_policy().eval()
        assert copy.spec == policy.spec
        noise = self.noise(policy)
        for drawn in (None, noise):
            left, right = self.decide(policy, drawn), self.decide(copy, drawn)
            exact = self.config.lora_rank == 0  # adapters are merged into the weights
            np.testing.assert_allclose(left.actions, right.actions, atol=0 if exact else 1e-3)
            np.testing.assert_allclose(left.log_probs, right.log_probs, atol=0 if exact else 1e-3)

    def test_gradients_reach_exactly_the_trainable_parameters(self, policy: Any) -> None:
        batch = self.batch(policy, self.decide(policy, self.noise(policy)).trace)
        policy.zero_grad()
        wants = ("log_probs", "values") if self.value_head else ("log_probs",)
        outputs = policy(**policy.score(batch, _TEMPERATURE), wants=wants)
        sum((value * torch.rand_like(value)).sum() for value in outputs.values()).backward()
        reached = {name for name, parameter in policy.named_parameters() if parameter.grad is not None}
        trainable = {name for name, parameter in policy.named_parameters() if parameter.requires_grad}
        some = any(bool(parameter.grad.any()) for parameter in policy.parameters() if parameter.grad is not None)
        policy.zero_grad()
        unreached = {name for name in trainable if any(fnmatchcase(name, pattern) for pattern in self.unreached)}
        assert reached == trainable - unreached
        assert some, "all gradients are zero"

    def test_encoded_actions_have_a_log_prob(self, policy: Any) -> None:
        if "demonstrated_log_probs" in policy.spec.missing:
            pytest.skip(policy.spec.missing["demonstrated_log_probs"])
        decision = self.decide(policy, self.noise(policy))
        trace = policy.encode_actions(decision.actions)
        assert torch.isfinite(self.log_probs(policy, self.batch(policy, trace))).all()
        again = policy.encode_actions(decision.actions[0])
        for name, value in trace.items():
            np.testing.assert_array_equal(value[0], again[name])

    def test_supervised_quantities(self, policy: Any) -> None:
        spec, actions = policy.spec, self.decide(policy, None).actions
        ahead = np.minimum(np.arange(spec.demonstrated_actions), spec.action_chunk_len - 1)
        batch = self.batch(policy, policy.encode_actions(actions[:, ahead]))
        outputs = policy(**policy.score(batch, 1.0), wants=("loss",))
        shape = (_ROWS, spec.demonstrated_actions * spec.columns_per_action)
        assert all(outputs[name].shape == shape for name in ("loss", "error", "correct"))
        assert outputs["loss"].requires_grad and torch.isfinite(outputs["loss"]).all()

    def test_what_is_missing_raises(self, policy: Any) -> None:
        batch = self.batch(policy, self.decide(policy, None).trace)
        for name in policy.spec.missing:
            if name in ("entropy", "sum_pi_squared"):
                with pytest.raises((NotImplementedError, AttributeError)):
                    policy(**policy.score(batch, 1.0), wants=(name,))
        if "rsample" in policy.spec.missing:
            with pytest.raises((NotImplementedError, AttributeError)):
                policy.distribution(batch).rsample(torch.from_numpy(self.noise(policy)))

    def draws(self, policy: Any, distribution: ActionDistribution) -> Tensor:
        """[_DRAWS, B, K]: log-probs of samples from the distribution."""
        rng, spec = np.random.default_rng(3), policy.spec
        with torch.no_grad():
            drawn = []
            for _ in range(_DRAWS):
                noise = np.stack([spec.draw(rng) for _ in range(_ROWS)])
                drawn.append(distribution.sample(torch.from_numpy(noise)))
            self._traces = [output.trace for output in drawn]
            return torch.stack([output.log_probs for output in drawn]).double()

    def assert_mean(self, values: Tensor, exact: Tensor) -> None:
        """Assert that the mean over the first dimension is within `_STANDARD_ERRORS` of the exact value."""
        error = values.std(0) / _DRAWS**0.5
        worst = ((values.mean(0) - exact.double()).abs() / (error + 1e-6)).max()
        assert float(worst) < _STANDARD_ERRORS

    def test_the_entropy_is_the_mean_of_minus_log_prob(self, policy: Any) -> None:
        if "entropy" in policy.spec.missing:
            pytest.skip(policy.spec.missing["entropy"])
        distribution = self.distribution(policy)
        with torch.no_grad():
            self.assert_mean(-self.draws(policy, distribution), distribution.entropy())

    def test_the_kl_is_the_mean_of_the_log_ratio(self, policy: Any) -> None:
        if "kl" in policy.spec.missing:
            pytest.skip(policy.spec.missing["kl"])
        distribution = self.distribution(policy)
        batch = self.batch(policy, self.decide(policy, None).trace)
        with torch.no_grad():
            other = policy.distribution(batch.index(torch.arange(_ROWS - 1, -1, -1)), 1.0)
            mine = self.draws(policy, distribution)
            theirs = torch.stack([other.log_prob(trace) for trace in self._traces]).double()
            self.assert_mean(mine - theirs, distribution.kl(other.parameters()))
            itself = distribution.kl(distribution.parameters())
        torch.testing.assert_close(itself, torch.zeros_like(itself), atol=1e-5, rtol=0)

    def test_the_kl_of_forward_is_that_of_the_distributions(self, policy: Any) -> None:
        if "kl" in policy.spec.missing:
            pytest.skip(policy.spec.missing["kl"])
        batch = self.batch(policy, self.decide(policy, self.noise(policy)).trace)
        inputs = policy.score(batch, _TEMPERATURE)
        with torch.no_grad():
            reference = parameters_of(policy(**inputs, wants=("parameters",)))
            kl = policy(**inputs, wants=("kl",), reference=reference)["kl"]
        torch.testing.assert_close(kl, torch.zeros_like(kl), atol=1e-5, rtol=0)
