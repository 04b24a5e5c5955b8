"""A LeRobot policy for estimating memory: tensors with shapes but no storage."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from rlvla.models.config import ActorConfig
from rlvla.models.families import RowShape
from rlvla.models.flow.head import PAIRS
from rlvla.models.lerobot.files import LeRobotFiles
from rlvla.models.lerobot.policy import LeRobotPolicy
from rlvla.models.lerobot.settings import LeRobotSettings
from rlvla.models.value_models import scalar_head as new_scalar_head


class LeRobotSketch:
    """A policy, or with a scalar head a critic or reward model; see `rlvla.models.families.Sketch`.

    Args:
        files: of the policy.
        settings: how it acts.
        row: size of one decision.
        actor: adapters and what is trained.
        scalar_head: add the scalar head of a critic or reward model, and freeze what it does not read.
        supervised: decisions are demonstrated, too, which takes `PAIRS` evaluations of the velocity.
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
        self._files, self._row, self._scalar_head, flow = files, row, scalar_head, settings.flow
        self._evaluations = max(PAIRS * supervised, flow.evaluations)
        self._policy: Any = LeRobotPolicy(files, settings, actor, network=files.empty_network())
        self.module = nn.ModuleDict({"policy": self._policy})
        if scalar_head:
            self._policy.freeze_read_out()
            self.module["head"] = new_scalar_head(self._policy.spec.feature_dim)

    def loss(self, rows: int) -> Tensor:
        """See `Sketch.loss`."""
        hidden = self._hidden(rows)
        if self._scalar_head:
            return self.module["head"](self._policy.column_features(hidden)).squeeze(-1).float().mean()
        return self._velocity(hidden, rows, self._evaluations).mean()

    @torch.no_grad()
    def decide(self, rows: int) -> None:
        """See `Sketch.decide`."""
        self._velocity(self._hidden(rows), rows, 1)

    def _velocity(self, hidden: Any, rows: int, evaluations: int) -> Tensor:
        x = torch.zeros(rows, evaluations, self._files.config.chunk_size, self._files.config.max_action_dim)
        output = self._policy.velocity(hidden, x, torch.ones(rows, evaluations))
        return output[0] + output[1] if isinstance(output, tuple) else output

    def _hidden(self, rows: int) -> Any:
        row, files = self._row, self._files
        side = files.image_size or _SIDE
        images = torch.zeros(rows, row.num_images, side, side, 3, dtype=torch.uint8)
        tokens = torch.zeros(rows, row.prompt_tokens, dtype=torch.long)
        state = torch.zeros(rows, files.config.max_state_dim)
        mask = torch.ones_like(tokens, dtype=torch.bool)
        return self._policy.hidden({}, images=images, tokens=tokens, token_mask=mask, state=state)


_SIDE = 64  # of images that are resized anyway
