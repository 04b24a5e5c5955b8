"""A curriculum of one's own: tasks near a success rate (`--task_sampling frontier`)."""

from dataclasses import dataclass

import numpy as np

from rlvla.algorithms.curricula import register_task_sampling
from rlvla.options import Options, arg


@dataclass(frozen=True)
class FrontierOptions(Options):
    frontier_success: float = arg(0.5, "success rate of the tasks that are drawn most often", minimum=0, maximum=1)
    frontier_width: float = arg(0.2, "distance from that rate at which the weight falls to 0.61", above=0)


@register_task_sampling("frontier", options=FrontierOptions)
def frontier(success, *, frontier_success=0.5, frontier_width=0.2):
    return np.exp(-(((success.recent - frontier_success) / frontier_width) ** 2) / 2)
