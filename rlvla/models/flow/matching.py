"""Decisions of a flow-matching policy without noise in the steps, scored by their flow-matching loss."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from rlvla.algorithms.flow import Velocity, flow_matching_time, interpolate, sample_ode, target_velocity
from rlvla.models.flow.settings import MATCHED_PAIRS, FlowSettings
from rlvla.models.policy import PolicyOutput


def matching_noise_width(denoised: tuple[int, int]) -> int:
    """Random numbers of a decision: x_1, then for each pair the noise of a chunk and its time."""
    numbers = denoised[0] * denoised[1]
    return numbers + MATCHED_PAIRS * (numbers + 1)


class FlowMatching:
    """Actions on the ODE from Gaussian noise; the K = A * D columns are in (action, dimension) order.

    The score of a column is its part of minus the flow-matching loss of the action, averaged over pairs of noise and
    time that are drawn with it: the columns of a decision sum to -mean(`cfm_loss`). It is no log-prob.

    Args:
        velocity: the network, given the observations; see `rlvla.algorithms.flow.Velocity`.
        settings: number of steps, and how greedy decisions start.
        chunk: (A, D).
        blank: [B, `matching_noise_width`] float32 zeros, for the number of rows and the device.
        denoised: (C, M), what the network denoises together, see `FlowDistribution`; None: `chunk`. The loss is of the
            decision alone.
    """

    def __init__(
        self,
        velocity: Velocity,
        settings: FlowSettings,
        chunk: tuple[int, int],
        blank: Tensor,
        denoised: tuple[int, int] | None = None,
    ):
        self._velocity, self._settings, self._chunk, self._blank = velocity, settings, chunk, blank
        self._denoised = denoised or chunk

    def _executed(self, values: Tensor) -> Tensor:
        """[..., C, M] -> [..., A, D]."""
        return values[..., : self._chunk[0], : self._chunk[1]]

    def velocity(self, x: Tensor, t: Tensor) -> Tensor:
        """Noisy actions x [B, R, C, M], t [B, R] -> [B, R, C, M]."""
        output = self._velocity(x, t)
        return output[0] if isinstance(output, tuple) else output

    def sample(self, noise: Tensor | None, *, greedy: bool = False) -> PolicyOutput:
        """Follow the ODE, without gradients.

        Args:
            noise: [B, `matching_noise_width`] standard normal; None for decisions from x_1 = 0.
            greedy: start where the settings say, otherwise from the x_1 in `noise`.
        """
        noise = (self._blank if noise is None else noise).float()
        numbers, sizes = self._denoised[0] * self._denoised[1], self._denoised
        x_1, pairs = noise[:, :numbers].unflatten(1, sizes), noise[:, numbers:].unflatten(1, (MATCHED_PAIRS, -1))
        if greedy and self._settings.eval_noise == "zero":
            x_1 = torch.zeros_like(x_1)
        with torch.no_grad():
            trace = {
                "x_0": sample_ode(self.velocity, x_1, self._settings.steps),
                "pair_noise": pairs[..., :-1].unflatten(2, sizes),
                "pair_time": flow_matching_time(torch.special.ndtr(pairs[..., -1])),
            }
            return PolicyOutput(self._executed(trace["x_0"]), self.log_prob(trace), trace)

    def log_prob(self, trace: Mapping[str, Tensor]) -> Tensor:
        """[B, K]: the parts of minus the flow-matching loss."""
        actions, noise, times = trace["x_0"].unsqueeze(1), trace["pair_noise"], trace["pair_time"]
        v = self.velocity(interpolate(actions, noise, times[..., None, None]), times).float()
        errors = self._executed(v - target_velocity(actions, noise)).square().mean(1).flatten(1)
        return -errors / errors.shape[1]

    def entropy(self) -> Tensor:
        """Not defined for actions without noise of their own."""
        raise NotImplementedError("actions on an ODE have no density, and so no entropy")

    def kl(self, other: Mapping[str, Tensor]) -> Tensor:
        """Not defined for actions without noise of their own."""
        raise NotImplementedError("actions on an ODE have no density, and so no KL")

    def sum_pi_squared(self) -> Tensor:
        """Not defined for densities."""
        raise NotImplementedError("a density has no sum of squared probabilities")
