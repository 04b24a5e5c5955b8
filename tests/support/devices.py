"""What needs a CUDA device, and the device."""

from __future__ import annotations

import pytest
import torch

CUDA = torch.device("cuda", 0)

needs_a_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device, or asked for beside other tests"),
]
