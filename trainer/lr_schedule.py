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

    With w = warmup_steps, m = min_lr_ratio and, for a step s,

        s < w:   peak * (s + 1) / (w + 1)
        s >= w:  peak * (m + (1 - m) * fall(s) * shape(p))

    The warm-up is linear (Goyal et al. 2017, section 2.2), and its first update already has a nonzero learning rate;
    the peak is reached at s = w. `fall` is 1, but for `inverse_sqrt` (Vaswani et al. 2017, section 5.3) and `power`
    (Shen et al. 2024, arXiv:2408.13359), where it is ((s + 1) / (w + 1)) ** -exponent.

    p is the progress of the decay, from 0 at its first step to 1 at T = total_steps and later. `cosine` and `linear`
    decay from w on. `warmup_stable_decay` (Hu et al. 2024, MiniCPM, section 4), `inverse_sqrt` and `power` decay in the
    last `decay_steps` before T, in a shape of three (Hägele et al. 2024, arXiv:2405.18392, section 3):

        linear: 1 - p        cosine: (1 + cos(pi p)) / 2        one_minus_sqrt: 1 - sqrt(p)

    A function of the user's own is a shape from w on.
    """
    if step < schedule.warmup_steps:
        return peak_lr * (step + 1) / (schedule.warmup_steps + 1)
    share = _fall(schedule, step) * _decay(schedule, step)
    return peak_lr * (schedule.min_lr_ratio + (1 - schedule.min_lr_ratio) * share)


def _fall(schedule: LrSchedule, step: int) -> float:
    exponents = {"inverse_sqrt": 0.5, "power": schedule.exponent}
    return ((step + 1) / (schedule.warmup_steps + 1)) ** -exponents.get(schedule.name, 0.0)


def _decay(schedule: LrSchedule, step: int) -> float:
    length = decay_steps(schedule)
    if length is None:
        return 1.0
    progress = 1.0
    if step < schedule.total_steps:
        progress = max(0.0, (step - schedule.total_steps + length) / length)
    is_one_shape = schedule.name in ("cosine", "linear") or is_import_path(schedule.name)
    return _shape(schedule.name if is_one_shape else schedule.decay_shape, progress)


def _shape(name: str, progress: float) -> float:
    """The share of the way from the lowest to the highest learning rate; `progress` of the decay is from 0 to 1."""
    if is_import_path(name):
        return float(code_of(name)(progress))
    if progress == 1:
        return 0.0
    if name == "one_minus_sqrt":
        return 1 - math.sqrt(progress)
    return (1 + math.cos(math.pi * progress)) / 2 if name == "cosine" else 1 - progress
