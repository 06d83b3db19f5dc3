"""Compares a model of Hugging Face, as Keel builds it, with the one that transformers builds."""

from typing import Any

import torch
from torch.utils.module_tracker import ModuleTracker

from configs.load import load
from configs.schema import HfModel
from models import build_model
from models.documents import Documents
from parallelisms.init import materialize
from scripts.parity_reference import batches, each_document_alone
from scripts.proving.own_types import Casts


def difference_from_transformers(config_name: str, overrides: tuple[str, ...] = ()) -> tuple[float, str, str]:
    """Compare the logits of the same weights and tokens in float64, on one process.

    With data.document_mask, Keel's are of packed documents, and transformers' of each document alone.

    Returns:
        The largest difference, relative to the largest logit; the first module in which transformers' model casts to
        float32 and Keel's does not, and how transformers' own model fails, both "" if it does not.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    config = load(config_name, overrides, world_size=1).config
    assert isinstance(config.model, HfModel)
    # By default transformers computes experts with torch's grouped products, which a CPU does not have in float64. This
    # is the same formula; the loops of some families add up in float32.
    fields: dict[str, Any] = {**config.model.fields, "experts_implementation": "batched_mm"}
    batch = next(iter(batches(config, 0, 1)))[0]
    tokens = batch.tokens
    try:
        described = AutoConfig.for_model(fields.pop("model_type"), **fields)
        theirs: Any = AutoModelForCausalLM.from_config(described, dtype=torch.float32).to(torch.float64)
        tracker = ModuleTracker()
        with tracker, Casts(tracker) as their_casts, torch.no_grad():
            theirs(input_ids=tokens, use_cache=False)
    except Exception as error:  # whatever the family's code makes of the config
        return 0.0, "", " ".join(f"{type(error).__name__}: {error}".split())
    with torch.device("meta"):
        ours = build_model(config.model).to(torch.float64)
    materialize(ours, torch.device("cpu"), config.training.seed)
    theirs.load_state_dict(dict(ours.named_parameters()), strict=False)  # buffers are its own
    with torch.no_grad():
        with tracker, Casts(tracker) as our_casts:
            ours(tokens)
        theirs.train()
        if batch.document_ids is None:
            expected = theirs(input_ids=tokens, use_cache=False).logits
            found = ours(tokens)
        else:
            expected = each_document_alone(
                lambda document: theirs(document, use_cache=False).logits, tokens, batch.document_ids
            )
            found = ours(tokens, batch.positions, Documents.find(batch.document_ids))
    ours_in_float32 = {_within_model(name) for name in our_casts.modules}
    theirs_alone = (name for name in map(_within_model, their_casts.modules) if name not in ours_in_float32)
    return float((found - expected).abs().max() / expected.abs().max()), next(theirs_alone, ""), ""


def _within_model(module: str) -> str:
    """The name of a module that a tracker gives, without that of the model's class before it."""
    return module.partition(".")[2]
