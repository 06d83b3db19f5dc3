"""Compares a model of Hugging Face, as Keel builds it, with the one that transformers builds."""

from typing import Any

import torch

from configs.load import load
from configs.schema import HfModel
from models import build_model
from parallelisms.init import materialize
from scripts.parity_reference import batches


def difference_from_transformers(config_name: str) -> tuple[float, str]:
    """Compare the logits of the same weights and tokens in float64, on one process.

    Returns:
        The largest difference, relative to the largest logit, and how transformers' own model fails; "" if it works.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    config = load(config_name, world_size=1).config
    assert isinstance(config.model, HfModel)
    # By default transformers computes experts with torch's grouped products, which a CPU does not have in float64. This
    # is the same formula; the loops of some families add up in float32.
    fields: dict[str, Any] = {**config.model.fields, "experts_implementation": "batched_mm"}
    tokens = next(iter(batches(config, 0, 1)))[0].tokens
    try:
        described = AutoConfig.for_model(fields.pop("model_type"), **fields)
        theirs: Any = AutoModelForCausalLM.from_config(described, dtype=torch.float32).to(torch.float64)
        with torch.no_grad():
            theirs(input_ids=tokens, use_cache=False)
    except Exception as error:  # whatever the family's code makes of the config
        return 0.0, " ".join(f"{type(error).__name__}: {error}".split())
    with torch.device("meta"):
        ours = build_model(config.model).to(torch.float64)
    materialize(ours, torch.device("cpu"), config.training.seed)
    theirs.load_state_dict(dict(ours.named_parameters()), strict=False)  # buffers are its own
    with torch.no_grad():
        expected = theirs.train()(input_ids=tokens, use_cache=False).logits
        found = ours(tokens)
    return float((found - expected).abs().max() / expected.abs().max()), ""
