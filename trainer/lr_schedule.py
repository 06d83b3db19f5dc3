"""The learning rate as a pure function of the step.

It does not depend on how far this launch goes (`training.steps`), only on `lr_schedule.total_steps`: a run that is
stopped, resumed or extended follows the same curve. Without state there is nothing to save, and nothing to get wrong on
a resume.
"""

import math

from configs.layout import decay_steps
from configs.own_code import code_of, is_import_path
from configs.schema import LrSchedule


def learning_rate(schedule: LrSchedule, peak_lr: float, step: int) -> float:
    """Compute the learning rate of the update that follows `step` finished ones (0 for the first).

    With w = warmup_steps, T = total_steps, m = min_lr_ratio and, for a step s,

        s < w:        peak * (s + 1) / (w + 1)
        w <= s < T:   peak * (m + (1 - m) * shape(p)),   p = max(0, (s - d) / (T - d))
        s >= T:       peak * (m + (1 - m) * shape(1)),   shape(1) = 0 but for a shape of the user's own

    The warm-up is linear (Goyal et al. 2017, section 2.2), and its first update already has a nonzero learning rate;
    the peak is reached at s = w. `cosine` decays from d = w with shape(p) = (1 + cos(pi p)) / 2 (Loshchilov and Hutter
    2017, eq. 5, one cycle); `linear` from d = w with shape(p) = 1 - p; `warmup_stable_decay` likewise from
    d = T - decay_steps, and stays at the peak until then (Hu et al. 2024, MiniCPM, section 4; linear as in Hägele et
    al. 2024, arXiv:2405.18392, section 3). A function of the user's own is a shape from d = w.
    """
    if step < schedule.warmup_steps:
        return peak_lr * (step + 1) / (schedule.warmup_steps + 1)
    start = schedule.warmup_steps
    if schedule.name == "warmup_stable_decay":
        start = schedule.total_steps - decay_steps(schedule)
    progress = 1.0
    if step < schedule.total_steps:
        progress = max(0.0, (step - start) / (schedule.total_steps - start))
    return peak_lr * (schedule.min_lr_ratio + (1 - schedule.min_lr_ratio) * _shape(schedule.name, progress))


def _shape(name: str, progress: float) -> float:
    """The share of the way from the lowest to the highest learning rate; `progress` of the decay is from 0 to 1."""
    if is_import_path(name):
        return float(code_of(name)(progress))
    if progress == 1:
        return 0.0
    return (1 + math.cos(math.pi * progress)) / 2 if name == "cosine" else 1 - progress
