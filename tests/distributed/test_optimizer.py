"""The fused update of sharded parameters equals that of whole ones."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn import Parameter

from configs.schema import Optimizer
from trainer.optimizers.build import build_optimizer, optimizer_state

SHAPES = {"embed_tokens.weight": (10, 4), "norm.weight": (2,)}  # over 4 ranks: uneven, and two ranks with nothing


def _train(sharded: bool) -> dict[str, torch.Tensor]:
    """Parameters and state, whole, after three updates."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),)) if sharded else None
    generator = torch.Generator().manual_seed(5)

    def make(shape: tuple[int, ...]) -> torch.Tensor:
        tensor = torch.randn(shape, generator=generator, dtype=torch.float64)
        return distribute_tensor(tensor, mesh, [Shard(0)]) if mesh else tensor

    parameters = {name: Parameter(make(shape)) for name, shape in SHAPES.items()}
    optimizer = build_optimizer(Optimizer(lr=1e-2), list(parameters.items()))
    for _ in range(3):
        for parameter in parameters.values():
            parameter.grad = make(tuple(parameter.shape))
        optimizer.step()
    state = {**parameters, **optimizer_state(optimizer, parameters)}
    return {name: getattr(tensor, "full_tensor", lambda t=tensor: t)().detach() for name, tensor in state.items()}


def test_sharded_update_equals_the_whole(ranks):
    expected = _train(sharded=False)
    for result in ranks(4, _train, True):
        assert result.keys() == expected.keys()
        for name, tensor in expected.items():  # to rounding: where a shard ends, the kernel's vector loop does, too
            torch.testing.assert_close(result[name], tensor, rtol=1e-14, atol=1e-14)
