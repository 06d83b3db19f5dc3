"""Python's garbage collector, held off while training computes: a pause of one rank is a wait of all.

Importing torch and building a model leave some 300,000 objects, which a full collection walks in 0.2 s of a core, at
a moment of its own, different on every rank. They are frozen once compilation is over. A full collection of what a
run makes after that takes 0.4 ms for 300 steps, and comes between the same two steps on all ranks.
"""

import gc

_INTERVAL = 100


class Garbage:
    """Collects between steps only; a context around training."""

    def __init__(self, warm_up_steps: int) -> None:
        """`warm_up_steps`: steps after which what exists is taken to stay."""
        self._steps = -warm_up_steps

    def __enter__(self) -> None:
        gc.disable()

    def __exit__(self, *_: object) -> None:
        gc.unfreeze()
        gc.enable()

    def after_step(self) -> None:
        """Call it after each step, when the device has work."""
        self._steps += 1
        if self._steps % _INTERVAL == 0:
            gc.collect()
        if self._steps == 0:
            gc.freeze()
