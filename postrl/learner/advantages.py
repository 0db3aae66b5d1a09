"""From the rewards of a group to advantages. Pure functions of one group; invalid members never enter a statistic."""

from __future__ import annotations

import numpy as np


def group_relative(
    reward_G: np.ndarray,
    valid_G: np.ndarray,
    *,
    normalize_std: bool,
    eps: float = 1e-6,
) -> np.ndarray:
    """Advantages of one group's members: reward minus the group's mean, over its standard deviation.

    GRPO, DeepSeekMath (arXiv 2402.03300), section 4.1.2; without the division: Dr.GRPO (arXiv 2503.20783), eq. 4.

    Args:
      reward_G: float [G]; entries of invalid members are ignored, whatever they hold.
      valid_G: bool [G]: whose episode was scored. An invalid member has advantage 0 and does not shift the mean: a zero
        put in its place would push the others' baseline down.
      normalize_std: divide by the standard deviation (population form) of the valid members.

    Returns:
      float32 [G]; all 0 when fewer than two members are valid or all valid rewards are equal: there is nothing to prefer.
    """
    assert reward_G.ndim == 1 and reward_G.shape == valid_G.shape and valid_G.dtype == bool
    advantage_G = np.zeros(reward_G.shape, np.float32)
    rewards = reward_G[valid_G].astype(np.float64)
    if len(rewards) < 2 or np.ptp(rewards) == 0:
        return advantage_G
    centred = rewards - rewards.mean()
    advantage_G[valid_G] = centred / (rewards.std() + eps) if normalize_std else centred
    return advantage_G
