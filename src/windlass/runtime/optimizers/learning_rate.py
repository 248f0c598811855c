"""The learning rate of each step: a warm-up, then a schedule."""

import math

from windlass.schema import TrainSettings


def learning_rate(settings: TrainSettings, step: int) -> float:
    """Learning rate of a step: linear warm-up, then what the schedule says.

    Sources: `cosine` Loshchilov & Hutter 2017, SGDR, arXiv:1608.03983, equation 5, without
    restarts; `wsd` Hu et al. 2024, arXiv:2404.06395, with the linear decay of Hägele et al. 2024,
    arXiv:2405.18392; `inverse_sqrt` Vaswani et al. 2017, arXiv:1706.03762, equation 3.

    Args:
        settings: peak rate, schedule, shares of warm-up and decay, final share, number of steps.
        step: step number, counted from 1.
    """
    steps, schedule = settings.steps, settings.schedule
    warmup_steps = round(settings.warmup * steps)
    if step <= warmup_steps:
        return settings.learning_rate * step / warmup_steps
    if schedule == "inverse_sqrt":
        return settings.learning_rate * math.sqrt(max(1, warmup_steps) / step)
    falling = round(settings.decay * steps) if schedule == "wsd" else steps - warmup_steps
    falling = max(1, falling)
    progress = min(1.0, max(0, step - (steps - falling)) / falling)
    height = 1 - progress
    if schedule == "cosine":
        height = 0.5 * (1 + math.cos(math.pi * progress))
    elif schedule == "constant":
        height = 1.0
    share = settings.final_rate + (1 - settings.final_rate) * height
    return settings.learning_rate * share
