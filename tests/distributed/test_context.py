"""Context parallelism: exact by every method, in memory that falls with the ranks, and nobody else notices."""

import math
import resource
from contextlib import ExitStack
from dataclasses import dataclass
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from configs.layout import mesh_sizes
from configs.load import load
from models.documents import Documents, attend_near
from parallelisms.attention import context, halo
from parallelisms.attention.context import _attend_part, _attend_some_heads, part_of, shard_batch
from parallelisms.attention.halo import largest_halo
from parallelisms.mesh import build_mesh
from tests.distributed.test_checkpoint import make_manager
from tests.marked import marked
from trainer.data.loader import IGNORED, build_loader
from trainer.step import build_learner
from trainer.validation import validate

_c10d = torch.ops._c10d_functional
METHODS = ("gather", "ring", "all_to_all")
BATCH, HEADS, KV_HEADS, SEQ_LEN, HEAD_DIM = 2, 8, 4, 48, 8


def plain(q, k, v, mask):
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=True)


def document_mask(ids):
    return (ids[:, :, None] == ids[:, None, :]).tril()[:, None]


def differences(method, dtype, with_documents, window=0, has_sinks=False):
    """Largest differences of this rank's output and gradients by q, k, v and sinks from one process's."""
    generator = torch.Generator().manual_seed(0)

    def draw(heads):
        return torch.randn(BATCH, heads, SEQ_LEN, HEAD_DIM, generator=generator, dtype=torch.float64)

    q, k, v, grad = draw(HEADS), draw(KV_HEADS), draw(KV_HEADS), draw(HEADS)
    ids = torch.randint(0, 3, (BATCH, SEQ_LEN), generator=generator).sort(dim=1).values if with_documents else None
    mask = None if ids is None else document_mask(ids)
    documents = None if ids is None else Documents.find(ids).numbered()
    if window:
        near = torch.ones(SEQ_LEN, SEQ_LEN, dtype=torch.bool).tril().triu(1 - window)
        mask = near if mask is None else near & mask
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    sinks = [torch.linspace(-2, 3, HEADS, dtype=torch.float64, requires_grad=True)] if has_sinks else []
    if has_sinks:
        # Of a mask of all pairs, which a test of its own compares with sinks written out.
        with patch("models.documents.has_kernel", lambda *_: False):
            expected = attend_near(*leaves, mask, 0, *sinks)
    else:
        expected = plain(*leaves, mask)
    *expected_gradients, by_sinks = torch.autograd.grad(expected, [*leaves, *sinks], grad) + (() if sinks else (None,))

    group = dist.distributed_c10d._get_default_group().group_name
    part = part_of(SEQ_LEN, dist.get_world_size(), dist.get_rank(), method)
    # As a model has them: (batch, seq, heads, head_dim) in memory.
    parts = [t[:, :, part].to(dtype).transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for t in (q, k, v)]
    where = {"group": group, "place": (dist.get_rank(), dist.get_world_size())}
    own = [each.detach().to(dtype).requires_grad_() for each in sinks]
    more = {"sinks": own[0]} if has_sinks else {}
    if method == "all_to_all":
        attend = attend_near if has_sinks else plain
        more |= {"window": window} if window else {}
        out = _attend_some_heads(*parts, documents if has_sinks else mask, attend=attend, **where, **more)
    else:
        out = _attend_part(*parts, documents, method=method, kernel="auto", window=window, **where, **more)
    *gradients, part_of_sinks = torch.autograd.grad(out, [*parts, *own], grad[:, :, part].to(dtype)) + (
        () if sinks else (None,)
    )
    pairs = zip((out, *gradients), (expected, *expected_gradients), strict=True)
    found = [(found.double() - whole[:, :, part]).abs().max().item() for found, whole in pairs]
    if has_sinks:
        dist.all_reduce(part_of_sinks)
        found.append((part_of_sinks - by_sinks).abs().max().item())
    return found


@pytest.mark.parametrize("with_documents", [False, True])
@pytest.mark.parametrize(
    ("n_ranks", "method"), [(n, m) for n in (2, 3, 4) for m in METHODS if n != 3 or m != "all_to_all"]
)
def test_attention_is_that_of_one_process(ranks, n_ranks, method, with_documents):
    for found in ranks(n_ranks, differences, method, torch.float64, with_documents):
        assert max(found) < 1e-13


@pytest.mark.parametrize("window", [1, 5, 8, 19, 60])
@pytest.mark.parametrize("n_ranks", [2, 3, 4])
def test_a_window_is_that_of_one_process(ranks, n_ranks, window):
    """Chunks have 12, 8 and 6 tokens."""
    for with_documents in (False, True):
        for found in ranks(n_ranks, differences, "ring", torch.float64, with_documents, window):
            assert max(found) < 1e-13


@pytest.mark.parametrize("window", [0, 5, 19])
@pytest.mark.parametrize("method", METHODS)
def test_sinks_are_those_of_one_process(ranks, method, window):
    for with_documents in (False, True):
        for found in ranks(2, differences, method, torch.float64, with_documents, window, True):
            assert len(found) == 5
            assert max(found) < 2e-13


def order(method):
    """What this rank begins, in order, forward and backward: transfers, and attention to a rank's keys."""
    begun = []

    def noting(name, call):
        return lambda *arguments: (begun.append(name), call(*arguments))[-1]

    gather = noting("transfer", _c10d.all_gather_into_tensor)
    with ExitStack() as patches:
        for name in ("attend", "attend_backward"):
            patches.enter_context(patch.object(context, name, noting(name, getattr(context, name))))
        patches.enter_context(patch.object(dist, "batch_isend_irecv", noting("transfer", dist.batch_isend_irecv)))
        others = {name: getattr(_c10d, name) for name in ("wait_tensor", "reduce_scatter_tensor")}
        patches.enter_context(patch.object(context, "_c10d", SimpleNamespace(all_gather_into_tensor=gather, **others)))
        differences(method, torch.float64, False)
    return begun


@pytest.mark.parametrize("method", ["gather", "ring"])
def test_the_first_transfer_goes_beside_a_ranks_own_block(ranks, method):
    for begun in ranks(2, order, method):
        assert begun[:5] == ["transfer", "attend", "attend", "transfer", "attend_backward"]


def differences_by_masks(*arguments):
    """As on a GPU whose kernel does not take the type or the width of the heads."""
    with patch.object(context, "flash_takes", lambda q: False):
        return differences(*arguments)


@pytest.mark.parametrize("window", [1, 8, 19])
def test_a_window_without_a_kernel_is_that_of_one_process(ranks, window):
    for with_documents, has_sinks in ((False, False), (True, False), (False, True), (True, True)):
        for found in ranks(3, differences_by_masks, "ring", torch.float64, with_documents, window, has_sinks):
            assert max(found) < 2e-13


def arrived(window):
    """Elements that each exchange of a layer with a window brings to this rank, forward and backward."""
    taken = []

    def exchange(tensor, n_taken, n_given, group):
        arriving = _c10d.all_to_all_single(tensor, n_taken, n_given, group)
        taken.append(arriving.numel())
        return arriving

    collectives = SimpleNamespace(all_to_all_single=exchange, wait_tensor=_c10d.wait_tensor)
    # No other collective is there.
    with patch.object(halo, "_c10d", collectives), patch.object(context, "_c10d", None):
        differences("ring", torch.float64, False, window)
    return taken


@pytest.mark.parametrize("window", [5, 19])
def test_a_window_brings_no_more_than_is_in_reach(ranks, window):
    found = ranks(4, arrived, window)
    assert [len(taken) for taken in found] == [2] * 4
    of_token = 2 * BATCH * KV_HEADS * HEAD_DIM
    before = [min(window - 1, 6 * rank) + min(window - 1, 6 * (7 - rank)) for rank in range(4)]
    assert [taken[0] for taken in found] == [of_token * tokens for tokens in before]
    assert sum(taken[1] for taken in found) == of_token * sum(before)
    assert largest_halo(4, SEQ_LEN // 4, window - 1) == max(before)


@pytest.mark.parametrize("method", METHODS)
def test_in_bfloat16_as_near_as_it_gets(ranks, method):
    for found in ranks(4, differences, method, torch.bfloat16, False):
        assert max(found) < 0.1


@dataclass
class Batch:
    tokens: torch.Tensor
    targets: torch.Tensor
    positions: torch.Tensor | None
    document_ids: torch.Tensor | None
    further: torch.Tensor | None


def own_part(method, with_documents):
    tokens = torch.arange(32).view(2, 16)
    documents = torch.arange(16).view(1, 16).expand(2, 16) // 5
    positions = tokens % 5 if with_documents else None
    further = torch.stack((tokens + 1, tokens + 2), dim=-1)
    whole = Batch(tokens, tokens + 1, positions, documents if with_documents else None, further)
    part = shard_batch(whole, init_device_mesh("cpu", (dist.get_world_size(),)), method)
    assert torch.equal(part.targets, part.tokens + 1)
    assert torch.equal(part.further, torch.stack((part.tokens + 1, part.tokens + 2), dim=-1))
    assert torch.equal(part.positions.expand(2, -1), part.tokens % (5 if with_documents else 16))
    assert part.document_ids is whole.document_ids
    return part.tokens[0].tolist()


@pytest.mark.parametrize("with_documents", [False, True])
def test_every_token_is_on_one_rank_with_its_position(ranks, with_documents):
    zigzag = ranks(2, own_part, "ring", with_documents)
    assert zigzag == [[*range(4), *range(12, 16)], [*range(4, 12)]]
    assert ranks(2, own_part, "all_to_all", with_documents) == [[*range(8)], [*range(8, 16)]]


# --------------------------------------------------------------------------- memory


def bytes_kept(seq_len, method, n_ranks, *more):
    """Bytes that autograd keeps of a forward pass, beside parameters."""
    sizes = {"training.seq_len": seq_len, "training.global_batch_size": 1, "mesh.cp": n_ranks, "fsdp.zero_stage": 2}
    words = (word for key, value in sizes.items() for word in (f"--{key}", str(value)))
    config = load("parity.toml", (*words, "--context.method", method, *more), n_ranks).config
    mesh = build_mesh(mesh_sizes(config, n_ranks), torch.device("cpu"))
    learner = build_learner(config, mesh)
    loader = build_loader(config, 0, 1, start_sample=0)
    (batch,) = learner.own_part(next(loader))
    kept = {}

    def pack(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        hidden = learner.passes.model(batch.tokens, batch.positions, loss=lambda hidden, weight: hidden)
    weights = {p.untyped_storage().data_ptr() for p in learner.passes.model.parameters()}  # gathered, in stage 2
    loader.close()
    assert hidden.requires_grad
    return sum(size for storage, size in kept.items() if storage not in weights)


@pytest.mark.parametrize("method", marked(METHODS, slow=["all_to_all"]))
def test_four_ranks_keep_a_quarter_each(ranks, method):
    (alone,) = ranks(1, bytes_kept, 2048, method, 1)
    # After all_to_all, attention's output is kept as it was computed and as it came back: 4 layers, dim 64, float64.
    twice = 4 * 512 * 64 * 8 if method == "all_to_all" else 0
    for kept in ranks(4, bytes_kept, 2048, method, 4):
        assert kept == pytest.approx(alone / 4 + twice, rel=0.01)


def test_a_window_keeps_what_is_in_reach_beside_a_quarter(ranks):
    """In each of 4 layers, keys and values of 64 tokens before each chunk; 4 heads of 8, float64."""
    (alone,) = ranks(1, bytes_kept, 1024, "gather", 1, "--model.window", "65")
    first, *others = ranks(4, bytes_kept, 1024, "ring", 4, "--model.window", "65")
    halo_bytes = 4 * 2 * 64 * 4 * 8 * 8
    assert first == pytest.approx(alone / 4 + halo_bytes, rel=0.01)
    for kept in others:
        assert kept == pytest.approx(alone / 4 + 2 * halo_bytes, rel=0.01)


def growth(seq_len, method):
    """Bytes by which forward and backward attention over documents raise this process's peak."""
    group, n_ranks = dist.distributed_c10d._get_default_group().group_name, dist.get_world_size()
    q, k, v = (torch.randn(1, 1, seq_len // n_ranks, 8, requires_grad=True) for _ in range(3))
    documents = Documents.find(torch.arange(seq_len)[None] // 1000).numbered()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    where = {"group": group, "place": (dist.get_rank(), n_ranks)}
    _attend_part(q, k, v, documents, method=method, kernel="auto", **where).sum().backward()
    return 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)


@pytest.mark.parametrize(
    "method", [pytest.param("gather", marks=pytest.mark.slow), pytest.param("ring", marks=pytest.mark.long)]
)
def test_documents_need_no_mask_of_the_whole_sequence(ranks, method):
    seq_len = 1 << 15
    assert max(ranks(2, growth, seq_len, method)) < 0.5 * seq_len**2 / 2


def long_step(seq_len):
    """Bytes by which an optimizer step raises this process's peak, and the step's loss."""
    sizes = {"dim": 8, "n_layers": 1, "n_heads": 1, "n_kv_heads": 1, "ffn_dim": 16, "vocab_size": 64}
    words = [f"--model.{key}={size}" for key, size in sizes.items()]
    words += [f"--training.{key}=float32" for key in ("dtype", "compute_dtype", "reduce_dtype")]
    words += [f"--training.seq_len={seq_len}", "--training.global_batch_size=1", "--mesh.cp=4"]
    config = load("parity.toml", words, 4).config
    learner = build_learner(config, build_mesh(mesh_sizes(config, 4), torch.device("cpu")))
    loader = build_loader(config, 0, 1, start_sample=0)
    micro_batches = next(loader)
    loader.close()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    result = learner.step(micro_batches, lr=1e-3).result()
    return 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before), result.loss


@pytest.mark.long
def test_a_sequence_of_131072_tokens_on_four_ranks(ranks):
    """The pairs of a rank's queries and all keys are 4 Gi; none of it may be written out."""
    for grown, loss in ranks(4, long_step, 1 << 17):
        assert grown < 1 << 28
        assert loss == pytest.approx(math.log(64), rel=0.01)


# --------------------------------------------------------------------------- the rest of the trainer


def learn(words, folder, steps):
    """Take up the run in `folder`, make some steps, save; returns losses, validation and all of the state."""
    words = ("--training.max_norm", "10", *words)
    config = load("parity.toml", words, dist.get_world_size()).config
    mesh = build_mesh(mesh_sizes(config, dist.get_world_size()), torch.device("cpu"))
    learner = build_learner(config, mesh)
    folder.mkdir(exist_ok=True)
    manager = make_manager(folder)
    saved = manager.resume(learner.state())
    start = saved["step"] if saved else 0
    loader = build_loader(config, mesh.dp_rank, mesh.sizes.dp, start_sample=start * config.training.global_batch_size)
    losses = [learner.step(next(loader), lr=1e-3).result().loss for _ in range(steps)]
    loader.close()
    manager.save(start + steps, learner.state(), {"step": start + steps, "tokens": 0})
    manager.close()
    held_out = build_loader(config, mesh.dp_rank, mesh.sizes.dp, start_sample=0, validation=True)
    validation = validate(learner, held_out, torch.arange(config.model.vocab_size), lambda: False)
    held_out.close()
    state = {n: t.full_tensor() if isinstance(t, DTensor) else t for n, t in learner.state().items()}
    return losses, validation, state


VALIDATION = (
    "--validation.interval",
    "1",
    "--validation.sequences",
    "6",
    "--validation.sources",
    '[{name = "held out", kind = "synthetic"}]',
)


@pytest.mark.long
def test_a_checkpoint_moves_between_cp_sizes_and_validation_stays(ranks, tmp_path):
    """2 steps on cp 2, 2 on cp 4 by another method, 2 on one process: as 6 on one process."""
    expected, validation, whole = ranks(1, learn, VALIDATION, tmp_path / "alone", 6)[0]
    folder, losses = tmp_path / "moved", []
    for n_ranks, method in ((2, "gather"), (4, "ring"), (1, "gather")):
        words = (*VALIDATION, "--mesh.cp", str(n_ranks), "--context.method", method)
        some, moved_validation, state = ranks(n_ranks, learn, words, folder, 2)[0]
        losses += some
    assert losses == pytest.approx(expected, rel=1e-12)
    for name, tensor in whole.items():
        torch.testing.assert_close(state[name], tensor, rtol=0, atol=1e-11)
    assert moved_validation.validation_loss == pytest.approx(validation.validation_loss, rel=1e-12)
    cp = ranks(4, learn, (*VALIDATION, "--mesh.cp", "2"), tmp_path / "other", 6)[0]
    assert cp[1].validation_loss == pytest.approx(validation.validation_loss, rel=1e-11)
    assert cp[1].validation_bits_per_byte == pytest.approx(validation.validation_bits_per_byte, rel=1e-11)
    assert math.isfinite(validation.validation_bits_per_byte)


def test_ignored_targets_may_lie_unevenly(ranks):
    """All of one rank's targets can be ignored: its tokens still count as keys."""
    (alone,) = ranks(1, loss_of_late_targets, ())
    assert (
        ranks(2, loss_of_late_targets, ("--mesh.cp", "2", "--context.method", "all_to_all"))
        == [pytest.approx(alone, rel=1e-13)] * 2
    )


def loss_of_late_targets(words):
    config = load("parity.toml", words, dist.get_world_size()).config
    mesh = build_mesh(mesh_sizes(config, dist.get_world_size()), torch.device("cpu"))
    learner = build_learner(config, mesh)
    loader = build_loader(config, mesh.dp_rank, mesh.sizes.dp, start_sample=0)
    micro_batches = next(loader)
    loader.close()
    for batch in micro_batches:
        batch.targets[:, : config.training.seq_len // 2] = IGNORED
    result = learner.step(micro_batches, lr=1e-3).result()
    return [result.loss, result.grad_norm]
