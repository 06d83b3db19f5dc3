"""Which models Hugging Face's own classes compute exactly as Keel does, so that they can be exported."""

from collections.abc import Iterator

from configs.architectures import description_of
from configs.architectures.llama_keys import n_further
from configs.architectures.mup import folds
from configs.schema import AnyModel, Model, OwnModel, is_described


def not_exportable(model: AnyModel) -> str:
    """Why a model can't be exported; "" if it can."""
    if isinstance(model, OwnModel):
        return "it is no model of transformers, but one's own"
    return "; ".join(_faults(model)) if is_described(model) else ""


def _faults(model: Model) -> Iterator[str]:
    if model.dim % model.n_heads:
        yield (
            f"dim {model.dim} is not a multiple of n_heads {model.n_heads}, which transformers requires whatever the "
            "head_dim"
        )
    kind = description_of(model).hf_class(model)
    if "norm.weight" in folds(model) and n_further(model) and kind.has_further:
        yield (
            "the multiplier of its head (model.mup_base_dim) has no place where the head is tied to the embedding and "
            "further tokens are predicted"
        )
    if found := kind.differences(model):
        yield f"{kind.name} is the nearest class, and computes other models: {', '.join(found)}"
