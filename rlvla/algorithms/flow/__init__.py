"""The math of flow-matching policies: pure functions on tensors.

Convention: x_t = t * noise + (1 - t) * action, t runs from 1 (noise) to 0 (action), and the network predicts the
velocity v(x, t), whose target is noise - action. A decision takes K steps of size d = 1 / K. Shapes: B decisions, R
evaluations of the network per decision, A actions per decision, D dimensions per action. See
`docs/algorithms/flow-policies.md`.
"""

from rlvla.algorithms.flow.chains import (
    FlowSampling,
    ScoredSteps,
    Velocity,
    noisy_step_count,
    noisy_step_index,
    sample_chain,
    sample_ode,
    score_chain,
)
from rlvla.algorithms.flow.matching import cfm_loss, flow_matching_time, interpolate, target_velocity
from rlvla.algorithms.flow.objectives import (
    denoising_clip,
    denoising_discount,
    dppo_loss,
    fpo_log_ratio,
    mirrored_loss,
    mirrored_terms,
    nft_loss,
    nft_reward,
)
from rlvla.algorithms.flow.steps import (
    anneal_noise_level,
    gaussian_entropy,
    gaussian_kl,
    gaussian_log_prob,
    learned_std,
    predict_action,
    predict_noise,
    step_distribution,
    time_grid,
)

__all__ = [
    "FlowSampling",
    "ScoredSteps",
    "Velocity",
    "anneal_noise_level",
    "cfm_loss",
    "denoising_clip",
    "denoising_discount",
    "dppo_loss",
    "flow_matching_time",
    "fpo_log_ratio",
    "gaussian_entropy",
    "gaussian_kl",
    "gaussian_log_prob",
    "interpolate",
    "learned_std",
    "mirrored_loss",
    "mirrored_terms",
    "nft_loss",
    "nft_reward",
    "noisy_step_count",
    "noisy_step_index",
    "predict_action",
    "predict_noise",
    "sample_chain",
    "sample_ode",
    "score_chain",
    "step_distribution",
    "target_velocity",
    "time_grid",
]
