"""Which models Hugging Face's own classes compute exactly as Keel does, so that they can be exported."""

from collections.abc import Iterator

from configs.schema import Model


def not_exportable(model: Model) -> str:
    """Why a model can't be exported; "" if it can."""
    return "; ".join(_faults(model))


def _faults(model: Model) -> Iterator[str]:
    if model.dim % model.n_heads:
        yield (
            f"dim {model.dim} is not a multiple of n_heads {model.n_heads}, which transformers requires whatever the "
            "head_dim"
        )
    if model.n_experts is None:
        return
    as_mixtral = {
        "n_shared_experts": (model.n_shared_experts, 0),
        "n_dense_layers": (model.n_dense_layers, 0),
        "router.scoring": (model.router.scoring, "softmax"),
        "router.renormalize": (model.router.renormalize, True),
    }
    found = [f"{key} is {value!r}, not {its!r}" for key, (value, its) in as_mixtral.items() if value != its]
    if model.router.load_balance == "bias":
        found.append("router.load_balance is 'bias', and Mixtral's router has no bias")
    if found:
        yield f"only mixtures of experts in the shape of Mixtral can be exported: {', '.join(found)}"
