"""The start-up summary's text on float8 matmuls, and whether this machine has them."""

import torch

from configs.float8 import choose
from configs.schema import Config
from parallelisms.float8 import check_float8
from trainer.planning.skeleton import skeleton

_SCALES = {
    "tensorwise": "one scale for a tensor",
    "rowwise": "a scale for each row",
    "rowwise_with_gw_hp": "a scale for each row, the weights' gradients in compute_dtype",
}


def float8_products(config: Config, device: torch.device) -> str:
    """The matrices that are multiplied in float8, for people; empty if there are none.

    Raises:
        ConfigError: this machine or this model cannot.
    """
    if config.float8.recipe == "none":
        return ""
    check_float8(config.float8, device)
    model = skeleton(config.model)
    parts = [str(choose(model.shapes, model.plan, config)), _SCALES[config.float8.recipe]]
    parts += ["gathered by FSDP in 8 bits"] if config.float8.fsdp_all_gather else []
    parts += ["emulated, slowly (float8.emulate)"] if config.float8.emulate else []
    return "; ".join(parts)
