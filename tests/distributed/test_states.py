"""Layers with a state under context parallelism: a rank's part is that of whole sequences, whatever the heads."""

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh

from models.delta import DeltaNet, outputs
from parallelisms.attention.context import part_of
from parallelisms.attention.recurrent import pass_states
from tests.unit.hf_support import TINY

BATCH, KEY_HEADS = 2, 1


def layer(conv_kernel):
    config = TINY["qwen3_next"]
    keys = {"key_heads": KEY_HEADS, "value_heads": 2 * KEY_HEADS, "conv_kernel": conv_kernel}
    torch.manual_seed(0)
    found = DeltaNet(config.model_copy(update={"delta": config.delta.model_copy(update=keys)})).double()
    for parameter in found.parameters():
        parameter.data.normal_(std=0.3)
    return found


def differences(n_ranks, conv_kernel, seq_len, mean_length):
    """Largest differences of this rank's outputs and gradients by its rows, gates and (summed) weights, from a process.

    mean_length: tokens of a document; None: there is one.
    """
    mesh = init_device_mesh("cpu", (n_ranks,), mesh_dim_names=("cp",))
    torch.manual_seed(seq_len)
    module = layer(conv_kernel)
    widths = (2 * module.key_dim + module.value_dim, 2 * module.sharing)
    rows, gates, weight = (
        torch.randn(BATCH, seq_len, KEY_HEADS, n, dtype=torch.float64) for n in (*widths, module.value_dim)
    )
    documents = (torch.rand(BATCH, seq_len) < 1 / mean_length).cumsum(1, dtype=torch.int32) if mean_length else None
    part = part_of(seq_len, n_ranks, mesh.get_local_rank(), "gather")

    def found(tokens):
        leaves = [t[:, tokens].clone().requires_grad_() for t in (rows, gates)]
        out = module.mix(*leaves, module._heads(), documents)
        weights = [module.q_conv, module.k_conv, module.v_conv, module.A_log, module.dt_bias]
        gradients = torch.autograd.grad((out * weight[:, tokens]).sum(), [*leaves, *weights])
        return out, gradients[:2], gradients[2:]

    whole, by_inputs, by_weights = found(slice(None))
    pass_states(module, mesh)
    ours, by_ours, by_own = found(part)
    for gradient in by_own:
        torch.distributed.all_reduce(gradient)
    pairs = [(ours, whole[:, part]), *zip(by_ours, (each[:, part] for each in by_inputs), strict=True)]
    pairs += zip(by_own, by_weights, strict=True)
    return [((mine - theirs).abs().max() / theirs.abs().max()).item() for mine, theirs in pairs]


@pytest.mark.parametrize("mean_length", [None, 30, 3], ids=["one document", "documents", "short documents"])
@pytest.mark.parametrize(
    ("n_ranks", "conv_kernel", "seq_len"),
    [
        (2, 4, 560),
        (3, 1, 84),
        (4, 4, 16),  # chunks of 2 tokens, of which a convolution takes 3
    ],
)
def test_parts_are_of_whole_sequences(ranks, n_ranks, conv_kernel, seq_len, mean_length):
    for found in ranks(n_ranks, differences, n_ranks, conv_kernel, seq_len, mean_length):
        assert max(found) < 1e-12


def test_tokens_that_come_twice_begin_with_what_they_make_of_zeros():
    """A memory that depends on the tokens, by `models.delta.Before`, against all tokens one after the other."""
    torch.manual_seed(0)
    heads = (BATCH, 150, 3)
    q, k = (F.normalize(torch.randn(*heads, 5, dtype=torch.float64), dim=-1) for _ in range(2))
    v = torch.randn(*heads, 2, 4, dtype=torch.float64)
    given = [q, k, v, -torch.rand(*heads, 2).double(), torch.rand(*heads, 2).double()]
    found = outputs(*given, None, lambda kept, gained: kept @ gained + gained)
    thrice = outputs(*(torch.cat((each, each, each), 1) for each in given), None)
    torch.testing.assert_close(found, thrice[:, 300:], rtol=0, atol=1e-12)
