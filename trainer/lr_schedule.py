"""The learning rate as a pure function of the step, or of the tokens before it.

It does not depend on how far this launch goes (`training.steps`), only on the schedule's own length: a run that is
stopped, resumed or extended follows the same curve. Without state there is nothing to save, and nothing to get wrong on
a resume.
"""

import math

from configs.layout import ScheduleLengths, schedule_lengths
from configs.own_code import code_of, is_import_path
from configs.run_stages import RunStage
from configs.schema import LrSchedule


def learning_rate_of(stage: RunStage, number: int) -> float:
    """The learning rate of the update in step `number` of the run, which is of this stage."""
    config = stage.config
    return learning_rate(config.lr_schedule, config.optimizer.lr, *stage.schedule_place(number))


def learning_rate(schedule: LrSchedule, peak_lr: float, done: int, size: int = 1) -> float:
    """Compute the learning rate of an update.

    Args:
        schedule: the shape and its lengths.
        peak_lr: the rate after the warm-up.
        done: finished steps of the schedule (0 for the first update); if it is measured in tokens, those trained.
        size: what the update's own step adds to `done`: 1, or its tokens.

    With s = done, d = size, w = warmup_steps and m = min_lr_ratio,

        s < w:   peak * (s + d) / (w + d)
        s >= w:  peak * (m + (1 - m) * fall(s) * shape(p))

    The warm-up is linear (Goyal et al. 2017, section 2.2), and its first update already has a nonzero learning rate;
    the peak is reached at s = w. `fall` is 1, but for `inverse_sqrt` (Vaswani et al. 2017, section 5.3) and `power`
    (Shen et al. 2024, arXiv:2408.13359), where it is ((s + d) / (w + d)) ** -exponent.

    p is the progress of the decay, from 0 at its first step to 1 at T = total_steps and later. `cosine` and `linear`
    decay from w on. `warmup_stable_decay` (Hu et al. 2024, MiniCPM, section 4), `inverse_sqrt` and `power` decay in the
    last `decay_steps` before T, in a shape of three (Hägele et al. 2024, arXiv:2405.18392, section 3):

        linear: 1 - p        cosine: (1 + cos(pi p)) / 2        one_minus_sqrt: 1 - sqrt(p)

    A function of the user's own is a shape from w on.
    """
    lengths = schedule_lengths(schedule)
    if done < lengths.warmup:
        return peak_lr * (done + size) / (lengths.warmup + size)
    exponents = {"inverse_sqrt": 0.5, "power": schedule.exponent}
    fall = ((done + size) / (lengths.warmup + size)) ** -exponents.get(schedule.name, 0.0)
    share = fall * _decay(schedule, lengths, done)
    return peak_lr * (schedule.min_lr_ratio + (1 - schedule.min_lr_ratio) * share)


def _decay(schedule: LrSchedule, lengths: ScheduleLengths, done: int) -> float:
    if lengths.decay is None:
        return 1.0
    progress = 1.0
    if done < lengths.total:
        progress = max(0.0, (done - lengths.total + lengths.decay) / lengths.decay)
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
