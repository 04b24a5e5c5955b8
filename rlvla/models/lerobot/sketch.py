"""A LeRobot policy on the meta device, for estimating memory."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from rlvla.models.config import ActorConfig
from rlvla.models.families import RowShape
from rlvla.models.flow.head import PAIRS
from rlvla.models.lerobot.files import LeRobotFiles
from rlvla.models.lerobot.network import Prefix
from rlvla.models.lerobot.policy import LeRobotPolicy
from rlvla.models.lerobot.settings import LeRobotSettings
from rlvla.models.value_models import scalar_head as new_scalar_head


class LeRobotSketch:
    """A policy, or with a scalar head a critic or reward model; see `rlvla.models.families.Sketch`.

    Args:
        files: of the policy.
        settings: of sampling.
        row: size of one decision.
        actor: adapters and trained parts.
        scalar_head: add the scalar head of a critic or reward model, and freeze parameters that it does not read.
        supervised: the policy is trained on demonstrations, too, with `PAIRS` evaluations of the velocity.
    """

    def __init__(
        self,
        files: LeRobotFiles,
        settings: LeRobotSettings,
        row: RowShape,
        actor: ActorConfig,
        *,
        scalar_head: bool = False,
        supervised: bool = False,
    ):
        self._files, self._row = files, row
        self._evaluations = max(PAIRS * supervised, settings.flow.evaluations)
        self._policy = LeRobotPolicy(files, settings, actor, network=files.empty_network())
        modules: dict[str, nn.Module] = {"policy": self._policy}
        self._head: nn.Linear | None = None
        if scalar_head:
            self._policy.freeze_read_out()
            modules["head"] = self._head = new_scalar_head(self._policy.spec.feature_dim)
        self.module: nn.Module = nn.ModuleDict(modules)

    def loss(self, rows: int) -> Tensor:
        """See `Sketch.loss`."""
        hidden = self._hidden(rows)
        if self._head is not None:
            return self._head(self._policy.column_features(hidden)).squeeze(-1).float().mean()
        return self._velocity(hidden, rows, self._evaluations).mean()

    @torch.no_grad()
    def decide(self, rows: int) -> None:
        """See `Sketch.decide`."""
        self._velocity(self._hidden(rows), rows, 1)

    def _velocity(self, hidden: Prefix, rows: int, evaluations: int) -> Tensor:
        x = torch.zeros(rows, evaluations, self._files.config.chunk_size, self._files.config.max_action_dim)
        output = self._policy.velocity(hidden, x, torch.ones(rows, evaluations))
        return output[0] + output[1] if isinstance(output, tuple) else output

    def _hidden(self, rows: int) -> Prefix:
        row, files = self._row, self._files
        side = files.image_size or 64  # any size, if images are resized
        images = torch.zeros(rows, row.num_images, side, side, 3, dtype=torch.uint8)
        tokens = torch.zeros(rows, row.prompt_tokens, dtype=torch.long)
        state = torch.zeros(rows, files.config.max_state_dim)
        mask = torch.ones_like(tokens, dtype=torch.bool)
        return self._policy.hidden({}, images=images, tokens=tokens, token_mask=mask, state=state)
