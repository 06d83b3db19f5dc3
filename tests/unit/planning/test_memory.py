"""The memory estimate: states against the bytes of real tensors, activations against what autograd keeps."""

import pytest
import torch

from configs.layout import MeshSizes, mesh_sizes
from configs.load import load
from configs.own_code import admit
from configs.schema import Config
from models import build_model
from trainer.optimizers.build import build_optimizer, optimizer_state
from trainer.planning.memory import RankMemory, estimate_memory
from trainer.planning.states import checkpoint_bytes

GIB = 2**30
ONE = MeshSizes(1, 1, 1)


def config(**tables):
    values = {
        "job": {"name": "toy"},
        "model": {"dim": 64, "n_layers": 4, "n_heads": 4, "n_kv_heads": 2, "ffn_dim": 176, "vocab_size": 100},
        "data": {"sources": [{"name": "s", "kind": "synthetic"}]},
        "training": {"steps": 1, "seq_len": 128, "global_batch_size": 4, "micro_batch_size": 4},
        "optimizer": {"lr": 1e-3},
        "lr_schedule": {"total_steps": 1},
    }
    for name, table in tables.items():
        values[name] = values.get(name, {}) | table
    return Config(**values)


def bytes_of(tensors):
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_states_are_the_bytes_of_model_gradients_and_adamw(tied, dtype):
    settings = config(model={"tie_embeddings": tied}, training={"dtype": dtype})
    model = build_model(settings.model).to(getattr(torch, dtype))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.zeros(1, 8, dtype=torch.long)).sum().backward()
    optimizer.step()
    estimate = estimate_memory(settings, ONE, "cpu")
    assert estimate.parameters == bytes_of(model.parameters())
    assert estimate.gradients == bytes_of(p.grad for p in model.parameters())
    assert estimate.optimizer == bytes_of(t for state in optimizer.state.values() for t in state.values())


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("optimizer", [{"moments_dtype": "bfloat16"}, {"name": "lion"}], ids=str)
def test_other_states_take_their_bytes(dtype, optimizer):
    settings = config(training={"dtype": dtype}, optimizer=optimizer)
    model = build_model(settings.model).to(getattr(torch, dtype))
    named = list(model.named_parameters())
    state = optimizer_state(build_optimizer(settings.optimizer, named), dict(named))
    assert estimate_memory(settings, ONE, "cpu").optimizer == bytes_of(state.values())
    assert checkpoint_bytes(settings) == bytes_of(model.parameters()) + bytes_of(state.values())


@pytest.mark.parametrize("kind", ["Adamax", "NAdam", "RMSprop"])
def test_a_class_of_torch_optimizers_takes_its_bytes_and_a_number_of_each_parameter(kind):
    admit(f"torch.optim:{kind}", "optimizer.name")
    settings = config(optimizer={"name": f"torch.optim:{kind}"})
    model = build_model(settings.model)
    optimizer = getattr(torch.optim, kind)(model.parameters())
    model(torch.zeros(1, 8, dtype=torch.long)).sum().backward()
    optimizer.step()
    own = bytes_of(t for state in optimizer.state.values() for t in state.values())
    estimate = estimate_memory(settings, ONE, "cpu").optimizer
    assert estimate == own + 4 * len(list(model.parameters()))
    assert checkpoint_bytes(settings) == bytes_of(model.parameters()) + estimate


@pytest.mark.parametrize(("dtype", "last", "n_bytes"), [("float32", 0, 4), ("bfloat16", 0, 2), ("bfloat16", 3, 6)])
def test_an_average_takes_the_bytes_of_its_type(dtype, last, n_bytes):
    settings = config(average={"interval": 10, "dtype": dtype, "last": last})
    elements = sum(parameter.numel() for parameter in build_model(settings.model).parameters())
    added = estimate_memory(settings, ONE, "cpu").optimizer - estimate_memory(config(), ONE, "cpu").optimizer
    assert added == n_bytes * elements
    assert checkpoint_bytes(settings) - checkpoint_bytes(config()) == n_bytes * elements + 8 * max(1, last)


@pytest.mark.parametrize(("micro_batch_size", "is_wider"), [(1, True), (4, False)])
def test_gradients_that_are_added_take_the_type_that_they_are_added_in(micro_batch_size, is_wider):
    """A step's only micro-batch has nothing to be added to, and a group's gradients are converted one by one."""

    def peak(dtype: str) -> int:
        training = {"dtype": "bfloat16", "reduce_dtype": dtype, "micro_batch_size": micro_batch_size}
        return estimate_memory(config(training=training), ONE, "cpu").peak.total

    elements = sum(parameter.numel() for parameter in build_model(config().model).parameters())
    assert (peak("float32") - peak("bfloat16") >= 2 * elements) == is_wider


def test_what_is_always_frozen_has_neither_gradients_nor_state():
    groups = [{"pattern": "layers.[02].*", "freeze": True}, {"pattern": "embed*", "freeze_until_step": 5}]
    settings = config(optimizer={"groups": groups})
    model = build_model(settings.model)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(("layers.0", "layers.2")))
    optimizer = torch.optim.AdamW(p for p in model.parameters() if p.requires_grad)
    model(torch.zeros(1, 8, dtype=torch.long)).sum().backward()
    optimizer.step()
    estimate, before = estimate_memory(settings, ONE, "cpu"), estimate_memory(config(), ONE, "cpu")
    assert estimate.parameters == before.parameters == bytes_of(model.parameters())
    assert estimate.gradients == bytes_of(p.grad for p in model.parameters() if p.requires_grad)
    assert estimate.optimizer == bytes_of(t for state in optimizer.state.values() for t in state.values())
    assert estimate.peak.total <= before.peak.total


def test_nothing_is_kept_of_blocks_that_no_gradient_reaches():
    groups = [{"pattern": f"{name}*", "freeze": True} for name in ("embed", "layers.0.", "layers.1.")]
    kept = [RankMemory(each, ONE, "cpu", 0)._waiting(4) for each in (config(), config(optimizer={"groups": groups}))]
    stream = 64 * 4 * 128 * 4  # what enters the first block, and the final norm's output: 4 bytes, 4 x 128 tokens
    assert kept[1] - 2 * stream == (kept[0] - 2 * stream) / 2


def test_a_shard_is_fsdps_largest():
    """Rows are cut as torch.chunk cuts them: 100 rows of vocabulary over 3 ranks are 34, 34 and 32."""
    settings = config(training={"global_batch_size": 24})
    model = build_model(settings.model)
    largest = sum(bytes_of([p.chunk(3, dim=0)[0]]) for p in model.parameters())
    assert estimate_memory(settings, MeshSizes(2, 3, 1), "cpu").parameters == largest


def test_tensor_parallel_ranks_hold_half_of_each_matrix_and_whole_norms():
    settings = config()
    model = build_model(settings.model)
    halves = sum(bytes_of([p]) // (2 if p.dim() == 2 else 1) for p in model.parameters())
    assert estimate_memory(settings, MeshSizes(1, 1, 2), "cpu").parameters == halves


def test_gradients_stay_whole_only_where_they_are_reduced_once_for_several_micro_batches():
    whole = sum(p.numel() for p in build_model(config().model).parameters()) * 4
    two = MeshSizes(1, 2, 1)
    sharded = estimate_memory(config(training={"micro_batch_size": 2}), two, "cpu").gradients
    for micro, expected in ((2, sharded), (1, whole)):
        settings = config(training={"micro_batch_size": micro}, fsdp={"accumulate": "reduce_last"})
        assert estimate_memory(settings, two, "cpu").gradients == expected


def test_exact_reductions_hold_a_partial_sum_for_each_bit_of_the_number_of_micro_batches():
    def in_loss(sizes, batch, **training):
        settings = config(training={"micro_batch_size": 1, "global_batch_size": batch, **training})
        moments = [m for m in RankMemory(settings, sizes, "cpu", 0).moments() if m.name == "the loss"]
        return moments[-1].gradients

    sizes = MeshSizes(2, 2, 1)
    once = in_loss(sizes, 8)
    assert in_loss(sizes, 4 * 2, reduction="exact") == once // 2  # of 2 micro-batches, and half of a shard
    assert in_loss(sizes, 4 * 8, reduction="exact") == 3 * once // 2
    assert in_loss(sizes, 4 * 15, reduction="exact") == 3 * once // 2


def test_zero_stages_keep_what_they_say():
    stages = [
        estimate_memory(config(training={"micro_batch_size": 1}, fsdp={"zero_stage": stage}), MeshSizes(1, 2, 1), "cpu")
        for stage in (1, 2, 3)
    ]
    whole = sum(p.numel() for p in build_model(config().model).parameters()) * 4
    assert stages[0].gradients == whole > stages[1].gradients == stages[2].gradients
    assert min(stages[0].peak.gathered, stages[1].peak.gathered) >= whole > stages[2].peak.gathered
    assert len({(stage.parameters, stage.optimizer) for stage in stages}) == 1


def test_context_parallel_ranks_hold_a_share_of_states_and_of_each_sequence():
    settings = {
        method: config(context={"method": method}, model={"n_kv_heads": 4})
        for method in ("gather", "ring", "all_to_all")
    }
    four = MeshSizes(1, 1, 1, cp=4)
    held = estimate_memory(config(model={"n_kv_heads": 4}, training={"micro_batch_size": 1}), MeshSizes(1, 4, 1), "cpu")
    assert estimate_memory(settings["gather"], four, "cpu").parameters == held.parameters
    alone = RankMemory(settings["all_to_all"], ONE, "cpu", 0)
    ranks = {method: RankMemory(each, four, "cpu", 0) for method, each in settings.items()}
    for rank in ranks.values():
        assert rank._waiting(4) == pytest.approx(alone._waiting(4) / 4, rel=0.05)
    keys_and_values = 2 * 64 * 4 * 128 / 4 * 4  # width, sequences, tokens of a rank, bytes
    assert ranks["gather"]._fetched(0) == keys_and_values * (4 + 2 * 4)
    assert ranks["ring"]._fetched(0) == keys_and_values * (2 + 3)
    assert ranks["all_to_all"]._fetched(0) == 0
    near = config(context={"method": "ring"}, model={"n_kv_heads": 4, "window": 9, "window_pattern": 2})
    of_near = RankMemory(near, four, "cpu", 0)
    assert of_near._fetched(0) == keys_and_values + 2 * keys_and_values * 2 * 8 // 32  # tokens before two chunks of 16
    assert of_near._fetched(1) == ranks["ring"]._fetched(1)


def test_offloaded_states_are_not_the_devices():
    accumulated = {"micro_batch_size": 1}
    kept, offloaded = (
        estimate_memory(config(training=accumulated, fsdp={"cpu_offload": off}), MeshSizes(1, 2, 1), "cuda")
        for off in (False, True)
    )
    assert kept.device - offloaded.device == kept.states


def test_gathered_parameters_follow_reshard_after_forward():
    two = MeshSizes(1, 2, 1)
    never, default = (
        RankMemory(config(training={"micro_batch_size": 2}, fsdp={"reshard_after_forward": how}), two, "cpu", 0)
        for how in ("never", "default")
    )
    model = build_model(config().model)
    parameters, head = (sum(p.numel() for p in module.parameters()) for module in (model, model.lm_head))
    head += 64  # the norm's, in its group
    for settings, gathered in ((never, parameters), (default, head)):
        (in_loss,) = (m for m in settings.moments() if m.name == "the loss")
        assert in_loss.gathered == 4 * (gathered + head)  # the last gather's buffer is there, too


def test_what_has_one_type_on_one_rank_is_not_gathered():
    assert estimate_memory(config(), ONE, "cuda").peak.gathered == 0


LATENT = {"query_rank": 40, "key_value_rank": 24, "rope_head_dim": 8, "value_head_dim": 12}


@pytest.mark.parametrize("keys", [{}, {"attention": "latent", "n_kv_heads": None, "latent": LATENT}], ids=str)
def test_activations_are_what_autograd_keeps(keys):
    settings = config(model=keys)
    model = build_model(settings.model)
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept = {}

    def pack(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        hidden = model(torch.zeros(4, 128, dtype=torch.long), loss=lambda hidden, weight: hidden)
    assert hidden.requires_grad
    measured = sum(size for storage, size in kept.items() if storage not in parameters)
    in_loss = next(RankMemory(settings, ONE, "cpu", 0).moments())
    assert in_loss.activations == pytest.approx(measured, rel=0.005)


@pytest.mark.slow
def test_a_compiled_block_may_have_buffers():
    """The biases of a router; without them the block keeps nearly as much."""
    sizes = []
    for balance in ("bias", "none"):
        mixture = {"n_experts": 4, "router": {"load_balance": balance}}
        job = config(model=mixture, compile={"enable": True})
        sizes.append(next(RankMemory(job, ONE, "cpu", 0).moments()).activations)
    assert sizes[0] == pytest.approx(sizes[1], rel=0.01)


@pytest.mark.slow
def test_the_more_is_recomputed_the_less_is_kept():
    modes = [
        {"mode": "full"},
        {"mode": "selective", "save_ops": ["aten._scaled_dot_product_*attention*"]},
        {"mode": "selective", "save_every_nth_matmul": 2},
        {"mode": "selective"},
        {"mode": "full", "layers": "0-7", "every_nth_layer": 2},
        {"mode": "none"},
    ]
    deep = {"n_layers": 16}
    jobs = [config(model=deep, training={"compute_dtype": "bfloat16"}, activation_checkpoint=mode) for mode in modes]
    sizes = [next(RankMemory(job, ONE, "cuda", 0).moments()).activations for job in jobs]
    assert sizes == sorted(set(sizes))


@pytest.mark.parametrize(
    ("mode", "batch", "published"),
    [("full", 8, 0.2392 * 95), ("selective", 8, 0.5213 * 95)],
)
def test_llama_7b_is_near_the_published_peak(mode, batch, published):
    """torchtrain PR 165: peak active memory on 8 H100 of 95 GiB, FSDP 8, sequence 2048, bf16; eager, no loss chunks."""
    settings = config(
        model={"dim": 4096, "n_layers": 32, "n_heads": 32, "n_kv_heads": None, "ffn_dim": 11008, "vocab_size": 32000},
        training={
            "seq_len": 2048,
            "micro_batch_size": batch,
            "global_batch_size": 8 * batch,
            "compute_dtype": "bfloat16",
        },
        activation_checkpoint={"mode": mode, "save_every_nth_matmul": 2 if mode == "selective" else 1},
    )
    assert estimate_memory(settings, MeshSizes(1, 8, 1), "cuda").device / GIB == pytest.approx(published, rel=0.3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "ranks", "gib"),
    [("qwen3_30b_a3b.toml", 16, 34.5), ("qwen3_235b_a22b.toml", 256, 25.5), ("deepseek_v3.toml", 2048, 33.9)],
)
def test_large_mixtures_fit_gpus_of_80_gb(name, ranks, gib):
    """What docs/models.md says of them."""
    config = load(name, (), ranks).config
    assert estimate_memory(config, mesh_sizes(config, ranks), "cuda").device / GIB == pytest.approx(gib, abs=0.05)
