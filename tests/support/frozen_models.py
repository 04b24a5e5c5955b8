"""What tests of frozen models share."""

from __future__ import annotations

from rlvla.utils.deepspeed.engine import OptimConfig
from rlvla.utils.deepspeed.strategy import DeepspeedStrategy

OPTIM = OptimConfig(1e-3, (0.9, 0.999), 0.0, "constant", 0.0, 10)


class NothingPersists(DeepspeedStrategy):
    """DeepSpeed keeps small parameters whole, and those of a tiny model are all small."""

    def _deepspeed_config(self, trainable: int) -> dict:
        settings = super()._deepspeed_config(trainable)
        settings["zero_optimization"]["stage3_param_persistence_threshold"] = 0
        return settings
