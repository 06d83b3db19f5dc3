"""A step's time: by hand for a small job, in order where the order is certain, and counted as the trace counts."""

import json
from dataclasses import replace
from statistics import median

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from checkpoint.shards import shards_of
from configs.errors import UserError
from configs.layout import mesh_sizes
from configs.load import load
from parallelisms.fake_ranks import fake_ranks
from parallelisms.mesh import build_mesh
from scripts import plan
from tests.published.compare import compared, rank_correlation
from trainer.planning.by_stage import run_time
from trainer.planning.devices import Link, Network, device_named, known_devices
from trainer.planning.layer_time import RAMP, LayerTime
from trainer.planning.memory import estimate_memory
from trainer.planning.step_time import StepTime, estimate_step, rank_of
from trainer.planning.takes_less import CONTEXT_BYTES
from trainer.planning.traffic import trace_step
from trainer.report.units import brief, percent
from trainer.step import assemble_learner, build_stages

H100 = device_named("h100")
SMALL = (
    "--model.n_layers 2 --training.seq_len 512 --training.global_batch_size 16 --training.micro_batch_size 1 "
    "--activation_checkpoint.mode none"
)
HYBRID = '--model.layers ["delta","full"] --model.n_experts 16 --mesh.ep 1'
FROZEN = '[{pattern="embed_tokens.*",freeze=true},{pattern="layers.0.*",freeze=true}]'
FEW_EXPERTS = "--model.n_layers 4 --model.n_experts 16"


def job(name, ranks, words=""):
    source = '[{name = "random", kind = "synthetic"}]'
    return load(name, [*words.split(), "--data.sources", source], ranks).config


def seconds(name, ranks, words="", device=H100):
    return estimate_step(job(name, ranks, words), ranks, device).seconds


def test_the_parts_of_a_dense_step_on_one_gpu_are_those_computed_by_hand():
    config = job("llama_1b.toml", 1, SMALL)
    step = estimate_step(config, 1, H100)
    tokens, micro_batches, dim, inner, kv, vocabulary = 512, 16, 2048, 8192, 512, 128256
    products = 0.0
    for inputs, outputs in [(dim, dim), (dim, kv), (dim, kv), (dim, dim), (dim, inner), (dim, inner), (inner, dim)]:
        moved = 2 * (tokens * (inputs + outputs) + inputs * outputs)
        products += 3 * (max(2 * tokens * inputs * outputs / H100.products, moved / H100.memory) + RAMP)
    assert step.parts["products"] == pytest.approx(micro_batches * 2 * products)
    forward, backward = 384e12, 320e12  # heads of 64; shorter sequences than the table's have the rates of its shortest
    scores = 2 * dim * 512 * tokens  # queries x keys and scores x values, of 32 heads x 64; the causal half
    attention = scores / forward + 2.5 * scores / backward + 4 * RAMP
    assert step.parts["attention"] == pytest.approx(micro_batches * 2 * attention)
    logits = tokens * vocabulary
    head = 6 * logits * dim / H100.products + 7 * logits / H100.memory
    assert step.parts["head and loss"] == pytest.approx(micro_batches * head)
    elementwise = tokens * (126 * dim + 4 * (dim + kv) + 30 * inner) / H100.memory
    assert step.parts["elementwise"] >= micro_batches * 2 * elementwise  # and copies of parameters, if FSDP casts them
    assert step.seconds == sum(step.parts.values())
    assert step.tokens_per_second == pytest.approx(16 * 512 / step.seconds)
    assert step.mfu == pytest.approx(step.flops / step.seconds / 989.5e12)
    run = run_time([(1000, step)])
    assert (run.steps, run.tokens) == (1000, 1000 * 16 * 512)
    assert run.gpu_hours == pytest.approx(1000 * step.seconds_with_waits / 3600)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "ranks"),
    [
        ("", 1),
        ("--average.interval 10", 2),
        ("--average.interval 10 --average.last 3", 2),
        ("--mesh.dp_replicate 2 --mesh.tp 2", 4),
        ("--fsdp.partition owner --mesh.dp_shard 1 --mesh.dp_replicate 2", 2),
        ("--fsdp.partition owner --mesh.dp_shard 1 --mesh.dp_replicate 2 --fsdp.owner_broadcast_dtype bfloat16", 2),
        ("--mesh.pp 2 --model.tie_embeddings false", 4),
    ],
)
def test_training_waits_for_the_copy_of_the_largest_part_of_the_state(words, ranks):
    """The bytes are those of the tensors that a rank gives to a save, on the pipeline's ends, which hold the most."""
    config = job("debug.toml", ranks, f"--training.compute_dtype bfloat16 --checkpoint.interval 200 {words}")
    sizes = mesh_sizes(config, ranks)
    staged = []
    for rank in range(ranks):
        with fake_ranks(ranks, rank):
            mesh = build_mesh(sizes, torch.device("cpu"))
            stages, names = build_stages(config, mesh)
            with FakeTensorMode(allow_non_fake_inputs=True):
                for stage in stages.values():
                    stage.to_empty(device="cpu")
                state = assemble_learner(config, mesh, stages, names).state()
            staged.append(sum(shard.local.nbytes for shard in shards_of(state).values()))
    save = estimate_step(config, ranks, H100).save
    assert save.n_bytes == pytest.approx(max(staged), rel=1e-4)
    assert save.copy == save.n_bytes / 55e9


def saved(words, ranks=16):
    return estimate_step(job("llama_1b.toml", ranks, f"--checkpoint.interval 200 {words}"), ranks, H100)


def test_the_ranks_of_a_host_share_its_disk_and_those_of_a_bucket_do_not():
    """0.9 GB/s a host; a rank's four requests take 0.15 s and 8 MiB at 85 MB/s."""
    by_ranks = {ranks: saved("", ranks).save for ranks in (1, 16)}
    assert by_ranks[1].write == by_ranks[1].n_bytes / 0.9e9
    assert by_ranks[16].write == pytest.approx(8 * by_ranks[16].n_bytes / 0.9e9)
    bucket = saved("--job.output_dir s3://bucket/run").save
    part = 8 * 2**20
    assert bucket.write == pytest.approx(bucket.n_bytes / (4 * part) * (0.15 + part / 85e6))


def test_training_waits_for_the_disk_where_it_must():
    beside = saved("--checkpoint.mode async")
    assert beside.save.wait == beside.save.copy
    assert beside.seconds_with_waits == pytest.approx(beside.seconds + beside.save.copy / 200)
    sync = saved("--checkpoint.mode sync").save
    assert sync.wait == pytest.approx(beside.save.copy + beside.save.write)
    often = saved("--checkpoint.mode async --checkpoint.interval 1")
    assert often.save.write > often.seconds  # the next save waits for the rest
    assert often.save.wait == pytest.approx(often.save.copy + often.save.write - often.seconds)
    assert often.save.of_a_step == often.save.wait


def test_a_run_that_saves_at_its_end_waits_for_no_save_and_states_in_host_memory_for_no_copy():
    at_the_end = saved("--checkpoint.interval 0")
    assert at_the_end.save.write > 0
    assert at_the_end.seconds_with_waits == at_the_end.seconds
    assert saved("--fsdp.cpu_offload true").save.wait == 0


@pytest.mark.parametrize(
    ("words", "bytes_of_the_whole", "bytes_of_a_shard"),
    [
        ("", 0, 3 * 3 * 4),  # three further sums of float32, of which each reads two and writes one
        # The first is converted, three are added to it, and three are not reduced (2 bytes read and 4 written).
        ("--fsdp.accumulate reduce_last", (2 + 4) + 3 * (2 + 2 * 4) - 3 * (2 + 4), 0),
    ],
)
def test_gradients_of_several_micro_batches_are_added_up(words, bytes_of_the_whole, bytes_of_a_shard):
    def elementwise(micro_batches):
        sequences = f"--training.micro_batch_size 1 --training.global_batch_size {8 * micro_batches}"
        config = job("llama_1b.toml", 8, f"{words} {sequences} --model.tie_embeddings false")
        return estimate_step(config, 8, H100).parts["elementwise"]

    elements = 16 * (2 * 2048**2 + 2 * 2048 * 512 + 3 * 2048 * 8192 + 2 * 2048) + 2 * 128256 * 2048 + 2048
    moved = elements * bytes_of_the_whole + elements / 8 * bytes_of_a_shard
    assert elementwise(4) - 4 * elementwise(1) == pytest.approx(moved / H100.memory, rel=1e-3)


@pytest.mark.parametrize("ep", [1, 2])
def test_few_rows_for_many_experts_take_as_long_as_reading_the_experts(ep):
    def products(experts):
        small = f"--training.seq_len 64 --training.micro_batch_size 1 --training.global_batch_size 2 --mesh.ep {ep}"
        few = f"{small} --model.n_layers 2 --model.n_experts {experts} --activation_checkpoint.mode none"
        return estimate_step(job("qwen3_30b_a3b.toml", 2, few), 2, H100).parts["products"]

    weights = 2 * 64 / ep * 2048 * 768  # bytes of 64 further experts' gate, up or down
    further = 2 * 3 * 3 * weights / H100.memory
    assert products(128) - products(64) == pytest.approx(further, rel=2e-3)  # the router grows, too


def test_a_cpu_computes_in_its_type_and_launches_nothing_ahead():
    """Bytes of elementwise kernels were counted in bfloat16, and float32 has twice as many; see `layer_time`."""
    cpu = device_named("cpu")
    config = job("debug.toml", 1, "--data.prepare none")
    parts = estimate_step(config, 1, cpu).parts
    layers, micro_batches, tokens = 4, 4, 4 * 256
    assert parts["waiting for the host"] == pytest.approx(micro_batches * layers * 80 * cpu.launch)
    moved = 2 * tokens * (76 * 192 + 90 * (192 + 64) + 36 * 576)
    elements = layers * (2 * 192 * (192 + 64) + 3 * 192 * 576 + 2 * 192) + 2 * 4096 * 192 + 192
    added = 3 * (micro_batches - 1) * 4 * elements
    assert parts["elementwise"] == pytest.approx((micro_batches * layers * moved + added) / cpu.memory)
    products = 0.0
    for inputs, outputs in [(192, 192), (192, 64), (192, 64), (192, 192), (192, 576), (192, 576), (576, 192)]:
        moved = 4 * (tokens * (inputs + outputs) + inputs * outputs)
        products += 3 * (max(2 * tokens * inputs * outputs / cpu.products, moved / cpu.memory) + RAMP)
    assert parts["products"] == pytest.approx(micro_batches * layers * products)
    busy = sum(parts.values()) - parts["waiting for the host"]
    assert busy > parts["waiting for the host"]  # which a GPU would hide


def test_the_plan_for_a_cpu_is_of_its_memory(capsys):
    """Ranks share the memory of their host, and there is neither CUDA nor NCCL."""
    words = ("debug.toml", "--ranks", "2", "--device", "cpu", "--data.prepare", "none")
    _, out, _ = run(capsys, *words, "--json")
    plan = json.loads(out)
    config = job("debug.toml", 2, "--data.prepare none")
    expected = estimate_memory(config, mesh_sizes(config, 2), "cpu")
    assert plan["memory_by_kind"][0]["peak_bytes"] == expected.device
    assert plan["memory_by_kind"][0]["communicators_bytes"] == 0
    assert plan["memory"]["fits"] == "yes"
    _, out, _ = run(capsys, *words, "--memory-gib", str(1.5 * expected.device / 2**30))
    assert out.lstrip().startswith("does not fit: ")
    assert "CUDA" not in out


def test_the_plan_for_a_cpu_speaks_of_ranks_and_of_the_hours_of_a_short_run(capsys):
    words = ("debug_stages.toml", "--ranks", "2", "--device", "cpu", "--data.prepare", "none", "--price", "2")
    _, out, _ = run(capsys, *words)
    _, as_json, _ = run(capsys, *words, "--json")
    hours = json.loads(as_json)["time"]["run"]["gpu_hours"]
    assert "GPU" not in out
    assert out.count("tokens/s a rank") == 1 + 3  # the longest stage, and each
    assert f"{hours:.3g} rank-hours; {2 * hours:.3g} at 2 a rank-hour" in " ".join(out.split())


def test_the_page_for_a_cpu_leaves_no_rank_the_whole_memory_of_its_host(capsys, tmp_path):
    page = tmp_path / "plan.html"
    assert (
        run(capsys, "debug.toml", "--ranks", "2", "--device", "cpu", "--data.prepare", "none", "--html", str(page))[0]
        == 0
    )
    assert "<title>free: 0.00 KiB</title>" in page.read_text()  # as without a memory that is known


def test_gated_deltanet_takes_what_one_layer_took_on_an_h200():
    """Of 16,384 tokens: docs/measurements.md. Tensor-parallel ranks have the heads' shares; full: forward twice."""
    measured = {"torch": (12.2e-3, 20.4e-3), "fla": (1.20e-3, 4.77e-3)}
    words = f'{SMALL} {HYBRID} --training.seq_len 4096 --training.micro_batch_size 4 --model.layers ["delta"]'
    for backend, (forward, backward) in measured.items():
        config = job("qwen3_next_80b_a3b.toml", 1, f"{words} --attention.delta_backend {backend}")
        parts = estimate_step(config, 1, device_named("h200")).parts
        assert parts["Gated DeltaNet"] == pytest.approx(4 * 2 * (forward + backward), rel=0.01)
        assert "attention" not in parts
        shared = job("qwen3_next_80b_a3b.toml", 2, f"{words} --attention.delta_backend {backend} --mesh.tp 2")
        half = estimate_step(shared, 2, device_named("h200")).parts
        assert half["Gated DeltaNet"] == pytest.approx(parts["Gated DeltaNet"] / 2)


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_selective_recomputation_keeps_what_the_kernels_of_gated_deltanet_give(mode):
    repeated = {}
    for backend in ("torch", "fla"):
        words = f"{SMALL} {HYBRID} --attention.delta_backend {backend} --activation_checkpoint.mode {mode}"
        repeated[backend] = estimate_step(job("qwen3_next_80b_a3b.toml", 1, words), 1, H100).parts["recomputation"]
    forward = {backend: 16 * 512 * 6 * 32 * 128 * 128 / rates[0] for backend, rates in H100.delta.items()}
    kernels = forward["fla"] if mode == "full" else 0
    assert repeated["torch"] - repeated["fla"] == pytest.approx(forward["torch"] - kernels)


def test_what_a_layer_of_gated_deltanet_exchanges_between_parts_of_a_sequence():
    """Bytes of 16 micro-batches of 512 tokens in 2 layers, forward and backward, on 2 ranks.

    all_to_all: rows of queries, keys, values and two gates a value head there, outputs back. gather: 3 rows before each
    of the two chunks, and the states of the 3 chunks before them, in float32.
    """
    rows = 2 * 16 * 128 + 32 * 128 + 2 * 32
    states = 3 * 32 * 128 * (128 + 128) * 4
    expected = {"all_to_all": 256 * 2 * (rows + 32 * 128), "gather": 2 * 3 * rows * 2 + states}
    for method, n_bytes in expected.items():
        words = f'{SMALL} {HYBRID} --model.layers ["delta"] --mesh.cp 2 --context.method {method}'
        step = estimate_step(job("qwen3_next_80b_a3b.toml", 2, words), 2, H100)
        (found,) = (each for each in step.slowest.collectives if each.axis == "cp")
        assert (found.op, found.n_bytes) == ("all_to_all", 16 * 2 * 2 * n_bytes)


def test_qk_clip_takes_half_of_attentions_forward_pass_again_and_gathers_keys():
    words = f"{SMALL} --training.seq_len 8192 --mesh.cp 2"
    plain, clipped = (
        estimate_step(job("llama_8b.toml", 2, f"{words} {more}"), 2, H100) for more in ("", "--optimizer.qk_clip 100")
    )
    passes = 2 * 16  # layers, and micro-batches
    products = 2 * 4096 * (8192 // 2) * 32 * 128  # a rank's tokens, those that each sees, features
    forward, _ = H100.attention_rates("cudnn", 128, 8192)
    again = passes * products / forward
    assert clipped.parts["attention"] - plain.parts["attention"] == pytest.approx(again, rel=1e-3)
    before, after = (
        sum(each.n_bytes for each in step.slowest.collectives if (each.op, each.axis) == ("all_gather", "cp"))
        for step in (plain, clipped)
    )
    assert after - before == passes * 8192 * 8 * 128 * 2


@pytest.mark.parametrize("method", ["gather", "ring"])
def test_a_layer_with_a_window_exchanges_keys_and_values_in_reach(method):
    """The second layer gathers all of 512 tokens; chunks of 64 tokens, 8 heads of 64, 2 bytes, 8 micro-batches."""
    words = f"{SMALL} --mesh.cp 4 --context.method {method} --model.window_pattern 2"

    def exchanged(more):
        collectives = estimate_step(job("llama_1b.toml", 8, f"{words} {more}"), 8, H100).slowest.collectives
        return {each.op: each.n_bytes for each in collectives if each.axis == "cp"}

    of_token = 8 * 2 * 8 * 64 * 2
    gathered = 512 * of_token
    forward_and_backward = {"all_gather": gathered, "reduce_scatter": gathered, "all_to_all": 2 * 2 * 47 * of_token}
    assert exchanged("--model.window 48") == forward_and_backward
    # Beyond a chunk; the last rank has 192 tokens before one of its chunks, and 256 before the other.
    assert exchanged("--model.window 300")["all_to_all"] == 2 * (192 + 256) * of_token
    kept = exchanged("--model.window 48 --activation_checkpoint.mode selective")  # attention, which gathers by itself
    assert kept == forward_and_backward | {"all_to_all": 3 * 2 * 47 * of_token}


def test_attention_hides_a_ring_and_no_window():
    def exposed(layer):
        words = f"{SMALL} --mesh.cp 4 --context.method ring --model.window 48 --model.window_pattern 2"
        config = job("llama_1b.toml", 8, words)
        timed = LayerTime(config, mesh_sizes(config, 8), H100, gpus_per_host=8, place=0)
        return timed._exposed(layer, "forward", {"attention": 1.0})["cp"]

    assert exposed(0) > 0
    assert exposed(1) == 0


def test_a_collective_takes_its_bytes_over_the_slowest_link_that_it_passes():
    device = replace(H100, inside=Link(400e9, 0.0), between=Link(50e9, 0.0))
    network = Network(device, gpus_per_host=8)
    assert network.seconds("all_gather", 8e9, ranks=8, stride=1) == pytest.approx(7e9 / 400e9)
    assert network.seconds("all_gather", 16e9, ranks=16, stride=1) == pytest.approx(15e9 / 400e9)  # by 8 cards a host
    assert network.seconds("all_gather", 16e9, ranks=16, stride=4) == pytest.approx(15e9 / 100e9)  # by 2
    assert network.seconds("reduce_scatter", 4e9, ranks=4, stride=8) == pytest.approx(3e9 / 50e9)
    assert network.seconds("all_reduce", 8e9, ranks=8, stride=1) == pytest.approx(14e9 / 400e9)
    assert network.seconds("all_to_all", 16e9, ranks=16, stride=1) == pytest.approx(8e9 / 50e9)
    assert network.seconds("all_gather", 16e9, ranks=1, stride=1) == 0


def test_links_inside_of_hosts_and_between_them_work_at_the_same_time():
    device = replace(H100, inside=Link(400e9, 1e-6), between=Link(50e9, 10e-6))
    network = Network(device, gpus_per_host=8)
    assert network.transfer("all_gather", 8e9, 8, 1) == pytest.approx((7e9 / 400e9, 0, 7e-6))
    assert network.transfer("all_gather", 16e9, 16, 4) == pytest.approx(
        (15e9 / 400e9, 15e9 / 100e9, 71e-6)
    )  # 2 a host, of 8
    assert network.transfer("all_reduce", 16e9, 16, 4) == pytest.approx((30e9 / 400e9, 30e9 / 100e9, 142e-6))
    assert network.transfer("reduce_scatter", 4e9, 4, 8) == pytest.approx((0, 3e9 / 50e9, 30e-6))  # 1 a host
    assert network.transfer("all_to_all", 16e9, 16, 1) == pytest.approx((7e9 / 400e9, 8e9 / 50e9, 11e-6))
    assert network.transfer("all_to_all", 8e9, 8, 1) == pytest.approx((7e9 / 400e9, 0, 1e-6))  # in one host
    assert network.transfer("all_to_all", 4e9, 4, 8) == pytest.approx((0, 3e9 / 50e9, 10e-6))
    assert network.transfer("send", 1e9, 2, 4) == pytest.approx((1e9 / 400e9, 0, 1e-6))
    assert network.transfer("send", 1e9, 2, 8) == pytest.approx((0, 1e9 / 50e9, 10e-6))


@pytest.mark.parametrize(("ranks", "stride"), [(4, 4), (2, 5), (8, 2)])
def test_a_pipeline_that_leaves_its_host_at_one_boundary_of_several_sends_as_slowly_as_there(ranks, stride):
    device = replace(H100, inside=Link(400e9, 1e-6), between=Link(50e9, 10e-6))
    network = Network(device, gpus_per_host=8)
    assert network.transfer("send", 1e9, ranks, stride) == pytest.approx((0, 1e9 / 50e9, 10e-6))


@pytest.mark.parametrize(
    ("schedule", "boundaries"),
    [("1f1b", [1, 2, 2, 1]), ("interleaved_1f1b", [3, 4, 4, 3]), ("zero_bubble_v", [2, 4, 4, 2])],
)
def test_a_rank_sends_at_its_boundaries_with_other_ranks(schedule, boundaries):
    """As `trace_step` counts: the last rank of `zero_bubble_v` has two stages in a row, between which nothing moves."""
    words = f"{SMALL} --mesh.pp 4 --model.n_layers 8 --compile.enable false --pipeline.schedule {schedule}"
    config = job("llama_7b.toml", 4, words)
    for place, n in enumerate(boundaries):
        found = {each.op: each.calls for each in rank_of(config, 4, H100, 8, place).collectives() if each.axis == "pp"}
        assert found == {"send": 16 * n, "receive": 16 * n}, place


def test_collectives_say_which_links_they_use():
    """Rings of 32 ranks, tp 2 apart: four on each of eight hosts, over four cards. tp never leaves its host."""
    step = estimate_step(job("llama_8b.toml", 64, "--mesh.tp 2"), 64, H100)
    by_axis = {each.axis: each for each in step.slowest.collectives}
    sent = by_axis["shard"].n_bytes * 31 / 32
    assert by_axis["shard"].inside == pytest.approx(sent / 360e9)
    assert by_axis["shard"].between == pytest.approx(sent / (4 * 44e9))
    assert by_axis["tp"].inside == pytest.approx(by_axis["tp"].n_bytes / 2 / 360e9)
    assert by_axis["tp"].between == 0


def test_the_console_has_a_column_for_each_kind_of_rank(capsys):
    words = ("llama_7b.toml", "--ranks", "8", "--device", "h100", "--mesh.pp", "4")
    _, out, _ = run(capsys, *words, "--json")
    kinds = json.loads(out)["time"]["by_kind"]
    assert [kind["pipeline_rank"] for kind in kinds] == [0, 1, 3]
    for kind in kinds:
        assert kind["seconds"] == pytest.approx(sum(kind["parts_seconds"].values()))
    _, out, _ = run(capsys, *words)
    lines = out.split("a step on NVIDIA")[1].splitlines()
    assert next(line.split() for line in lines if "rank of the pipeline" in line)[-3:] == ["0", "1", "3"]
    shown = next(line for line in lines if "products" in line).split(maxsplit=1)[1]
    assert " ".join(shown.split()) == " ".join(brief(kind["parts_seconds"]["products"]) for kind in kinds)
    head = next(line for line in lines if "head and loss" in line)
    assert head.split()[3:5] == ["-", "-"]
    whole = next(line for line in lines if "in all" in line).split(maxsplit=2)[2]
    assert " ".join(whole.split()) == " ".join(brief(kind["seconds"]) for kind in kinds)


@pytest.mark.slow
def test_a_rank_of_one_kind_has_shares_and_its_collectives_stand_by_axis(capsys):
    words = ("llama_8b.toml", "--ranks", "64", "--device", "h100", "--mesh.tp", "2")
    _, out, _ = run(capsys, *words, "--json")
    time = json.loads(out)["time"]
    _, out, _ = run(capsys, *words)
    text = " ".join(out.split())
    products = time["parts_seconds"]["products"]
    assert f"products {brief(products)} {percent(products / time['step_seconds'])} " in text
    of_shard = [each for each in time["by_kind"][0]["collectives"] if each["axis"] == "shard"]
    seconds, inside, between = (sum(each[name] for each in of_shard) for name in ("seconds", "inside", "between"))
    calls = sum(each["calls"] for each in of_shard)
    said = f"{calls:,} calls: {brief(seconds)} (inside hosts {brief(inside)}, between hosts {brief(between)}), exposed"
    assert said in text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("llama_1b.toml", ""),
        ("llama_1b.toml", "--fsdp.reshard_after_forward never"),
        ("llama_1b.toml", "--fsdp.zero_stage 1"),
        ("llama_1b.toml", "--mesh.dp_replicate 2"),
        ("llama_1b.toml", "--mesh.tp 2"),
        ("llama_1b.toml", "--mesh.tp 2 --activation_checkpoint.mode full"),
        ("llama_1b.toml", "--mesh.tp 2 --activation_checkpoint.mode selective"),
        ("llama_1b.toml", "--mesh.tp 2 --model.multi_token.depth 1"),
        ("llama_1b.toml", "--mesh.dp_shard 1 --mesh.dp_replicate 8 --fsdp.partition owner"),
        ("mixtral_8x7b.toml", "--mesh.dp_shard 1 --mesh.dp_replicate 8 --mesh.ep 2 --fsdp.partition owner"),
        ("llama_7b.toml", "--mesh.pp 2"),
        ("llama_7b.toml", f"--mesh.pp 2 --mesh.tp 2 --model.n_layers 4 --optimizer.groups {FROZEN}"),
        ("mixtral_8x7b.toml", "--mesh.ep 2"),
        ("mixtral_8x7b.toml", "--mesh.ep 2 --activation_checkpoint.mode full"),
        ("mixtral_8x7b.toml", "--mesh.ep 2 --mesh.tp 2"),
        ("qwen3_next_80b_a3b.toml", f"{HYBRID} --mesh.tp 2 --model.vocab_size 4096"),
        ("deepseek_v3.toml", f"{FEW_EXPERTS} --mesh.pp 1 --mesh.tp 2 --mesh.ep 2 --model.vocab_size 4096"),
    ],
)
def test_collectives_have_the_bytes_that_a_traced_step_has(name, words):
    config = job(name, 8, f"{SMALL} {words}")
    counted = {(each.op, each.axis): each.n_bytes for each in estimate_step(config, 8, H100).by_kind[0].collectives}
    traced = {(kind.op, kind.axis): traffic.n_bytes for kind, traffic in trace_step(config, 8, 0).items()}
    found, large = ({kind: n for kind, n in each.items() if n > 2**20} for each in (counted, traced))
    assert found.keys() == large.keys()
    for kind, n_bytes in large.items():
        assert found[kind] == pytest.approx(n_bytes, rel=3e-3), kind  # without the norms' sums over tp


def test_collectives_of_modules_that_predict_further_tokens_are_counted():
    def calls(words: str) -> dict[str, int]:
        config = job("llama_1b.toml", 8, f"{SMALL} --mesh.tp 2 {words}")
        collectives = estimate_step(config, 8, H100).slowest.collectives
        return {each.op: each.calls for each in collectives if each.axis == "tp"}

    # A micro-batch, of four: two pairs forward and two backward in the block; what embeds and the head have one each.
    with_one = calls("--model.multi_token.depth 1")
    assert {op: with_one[op] - n for op, n in calls("").items()} == {"all_gather": 24, "reduce_scatter": 24}


def test_the_matrix_that_joins_what_a_further_token_is_predicted_from_is_summed_over_tp():
    config = job("llama_1b.toml", 8, f"{SMALL} --mesh.tp 2 --model.multi_token.depth 2")
    (found,) = (each for each in estimate_step(config, 8, H100).slowest.collectives if each.op == "all_reduce")
    assert (found.axis, found.calls, found.n_bytes) == ("tp", 2 * 4, 2 * 4 * 2 * (2 * 2048 * 2048))


@pytest.mark.parametrize(("words", "element"), [("", 4), ("--fsdp.owner_broadcast_dtype bfloat16", 2)])
def test_owners_broadcast_what_they_train(words, element):
    """As `trace_step` counts, of which a test below compares the bytes."""
    owners = "--mesh.dp_shard 1 --mesh.dp_replicate 4 --fsdp.partition owner --model.tie_embeddings false"
    config = job("llama_1b.toml", 4, f"{SMALL} {owners} --optimizer.groups {FROZEN} {words}")
    found = next(each for each in estimate_step(config, 4, H100).slowest.collectives if each.op == "broadcast")
    trained = 128256 * 2048 + 2048 + 2 * 2048 * 2048 + 2 * 512 * 2048 + 3 * 8192 * 2048 + 2 * 2048
    assert found.axis == "replicas"
    assert found.n_bytes == pytest.approx(trained * element, abs=found.calls)
    assert found.seconds > 0


def test_frozen_layers_of_a_pipelines_first_stage_alone_have_no_backward_pass():
    """Later stages receive activations that take a gradient, whatever trains."""
    words = f"{SMALL} --model.n_layers 8 --mesh.pp 2 --pipeline.schedule interleaved_1f1b --optimizer.groups"
    groups = '[{pattern="embed_tokens.*",freeze=true},{pattern="layers.[0-4].*",freeze=true}]'
    config = job("llama_7b.toml", 2, f"{words} {groups}")
    layers = [rank_of(config, 2, H100, 8, place).memory.layers for place in (0, 1)]
    idle = [rank_of(config, 2, H100, 8, place).memory.idle_layers for place in (0, 1)]
    assert idle == [set(layers[0][: layers[0].index(max(idle[0])) + 1]), set()]
    assert max(idle[0]) < min(layers[1])


def test_gradients_of_matrices_that_each_rank_has_whole_are_summed_over_tp():
    """Of latent attention, the projections to what its heads share; routers. One sum for each micro-batch."""
    words = f"{SMALL} {FEW_EXPERTS} --mesh.pp 1 --mesh.tp 2 --mesh.ep 1"
    groups = '[{pattern="layers.*.self_attn.kv_a_proj_with_mqa.weight",freeze=true}]'
    step = estimate_step(job("deepseek_v3.toml", 2, f"{words} --optimizer.groups {groups}"), 2, H100)
    (found,) = (each for each in step.slowest.collectives if (each.op, each.axis) == ("all_reduce", "tp"))
    assert found.n_bytes == 16 * 2 * 7168 * (4 * 1536 + 1 * 16)
    assert found.calls == 16 * (4 + 1)


def test_layers_that_no_gradient_reaches_have_no_backward_pass():
    """The embedding and the first of two layers are frozen; the second is like it, and a backward pass takes two."""

    def planned(groups: str) -> StepTime:
        words = f"{SMALL} --mesh.tp 2 --activation_checkpoint.mode full --model.tie_embeddings false"
        return estimate_step(job("llama_1b.toml", 2, f"{words} --optimizer.groups {groups}"), 2, H100)

    plain, partly = planned("[]"), planned(FROZEN)
    for part, of_plain, of_partly in (("products", 6, 4), ("recomputation", 2, 1)):
        assert partly.parts[part] * of_plain == pytest.approx(plain.parts[part] * of_partly), part
    calls, fewer = ({each.op: each.calls // 16 for each in step.slowest.collectives} for step in (plain, partly))
    # A layer's two pairs forward, two backward, and again the gathers and all but the last reduction; as it is traced.
    assert calls == {"all_gather": 2 * 6 + 2, "reduce_scatter": 2 * 5 + 2}
    assert fewer == {"all_gather": 6 + 2 + 1, "reduce_scatter": 5 + 2 + 2}


def test_shared_experts_hide_what_they_can_of_the_rows_way_there():
    def exposed(exchange: str, kind: str) -> float:
        config = job("deepseek_moe_16b.toml", 8, f"{SMALL} --training.seq_len 4096 --mesh.ep 8 {exchange}")
        return LayerTime(config, mesh_sizes(config, 8), H100, gpus_per_host=8, place=0)._exposed(1, kind, {})["ep"]

    buffers = "--expert.exchange buffers --expert.buffer_factor 1"
    whole = exposed("", "backward")  # without waiting for the sizes
    tokens, dim, inner = 4096, 2048, 2 * 1408
    moved = 2 * (tokens * (dim + inner) + dim * inner)
    product = max(2 * tokens * dim * inner / H100.products, moved / H100.memory) + RAMP
    assert exposed(buffers, "forward") == pytest.approx(whole - min(3 * product, whole / 2))
    assert exposed(buffers, "backward") == pytest.approx(whole - min(6 * product, whole / 2))
    assert 3 * product < whole / 2


def test_more_recomputation_takes_longer():
    modes = [
        "none",
        "selective",
        "selective --activation_checkpoint.save_every_nth_matmul 2",
        "full",
    ]
    times = [seconds("llama_8b.toml", 8, f"--activation_checkpoint.mode {mode}") for mode in modes]
    assert times == sorted(times)
    assert len(set(times)) == len(times)


def test_more_ranks_are_no_slower_at_the_same_global_batch():
    times = [seconds("llama_8b.toml", ranks) for ranks in (8, 16, 32, 64, 128)]
    assert times == sorted(times, reverse=True)


def test_float8_is_faster_and_a_smaller_network_slower():
    assert estimate_step(job("llama_8b.toml", 8, "--float8.recipe tensorwise"), 8, H100).seconds < seconds(
        "llama_8b.toml", 8
    )
    config = job("llama_70b.toml", 256)
    hosts_of_4 = estimate_step(config, 256, H100, gpus_per_host=4)  # tp 8 spans two
    assert hosts_of_4.parts["tp"] > 2 * estimate_step(config, 256, H100).parts["tp"]


def test_stages_wait_while_a_pipeline_fills():
    words = "--mesh.pp 4 --training.global_batch_size {}"
    few, many = (estimate_step(job("llama_8b.toml", 8, words.format(n)), 8, H100) for n in (16, 128))
    assert few.parts["pipeline bubble"] / few.seconds > 0.2  # 3 of 8 + 3
    assert many.parts["pipeline bubble"] / many.seconds < 0.05  # 3 of 64 + 3


@pytest.mark.parametrize("name", ["qwen3_30b_a3b.toml", "deepseek_v3.toml", "gemma3_1b.toml", "olmo3_7b.toml"])
def test_every_kind_of_model_has_a_time(name):
    ranks = 1024 if name == "deepseek_v3.toml" else 16
    step = estimate_step(job(name, ranks), ranks, H100)
    assert 0.01 < step.mfu < 0.7


def test_windows_make_attention_faster():
    with_windows = estimate_step(job("olmo3_7b.toml", 8), 8, H100)
    without = job("olmo3_7b.toml", 8)
    without = without.model_copy(update={"model": without.model.model_copy(update={"window": None})})
    assert with_windows.parts["attention"] < estimate_step(without, 8, H100).parts["attention"]


@pytest.mark.parametrize("name", [name for name in known_devices() if name != "cpu"])
def test_every_device_has_rates_below_its_peaks(name):
    device = device_named(name)
    peak = device.peak[device.compute_dtype]
    assert device.grouped <= device.products < peak
    assert device.memory < device.peak["memory"]
    for rows in device.attention.values():
        assert max(rate for row in rows for rate in row[2:]) < peak
    h200 = device_named("h200")
    for backend, rates in device.delta.items():  # as memory, which bounds them
        assert rates == pytest.approx([rate * device.memory / h200.memory for rate in h200.delta[backend]], rel=0.01)


# --------------------------------------------------------------------------- the command


def run(capsys, *words):
    source = '[{name = "random", kind = "synthetic"}]'
    code = plan.main([*words, "--data.sources", source])
    return code, *capsys.readouterr()


def test_the_plan_says_what_a_step_and_the_run_take(capsys):
    code, out, _ = run(capsys, "llama_1b.toml", "--ranks", "8", "--device", "h100", "--price", "2")
    assert code == 0
    for words in (
        "tokens/s a GPU",
        "waiting for saves",
        " of a rank to its host",
        "the run",
        "GPU-hours",
        "at 2 a GPU-hour",
        "counted",
        "modelled",
        "waiting for data",
    ):
        assert words in " ".join(out.split())


def test_the_plan_as_json(capsys):
    code, out, _ = run(capsys, "llama_1b.toml", "--ranks", "8", "--device", "h100", "--price", "2", "--json")
    found = json.loads(out)
    assert code == 0
    assert found["time"]["step_seconds"] == pytest.approx(sum(found["time"]["parts_seconds"].values()))
    saves = found["time"]["saves"]
    assert saves["copy"] == pytest.approx(saves["n_bytes"] / H100.host)
    assert saves["seconds_of_a_step"] == pytest.approx(saves["wait"] / saves["interval"])
    of_a_step = found["time"]["step_seconds"] + saves["seconds_of_a_step"]
    assert found["time"]["run"]["seconds"] == pytest.approx(found["time"]["run"]["steps"] * of_a_step)
    assert found["time"]["run"]["price"] == pytest.approx(2 * found["time"]["run"]["gpu_hours"])


@pytest.mark.parametrize(
    "words", [(), ("--mesh.pp", "2"), ("--mesh.pp", "2", "--fsdp.cpu_offload", "true", "--mesh.dp_shard", "4")]
)
def test_the_parts_of_a_ranks_memory_make_its_peak(capsys, words):
    """Each kind of rank has a column, whose parts are rounded to hundredths of a GiB."""
    pipeline = ("--training.micro_batch_size", "1", "--model.tie_embeddings", "false") if words else ()
    command = ("llama_1b.toml", "--ranks", "8", "--memory-gib", "80", *pipeline, *words)
    _, out, _ = run(capsys, *command, "--json")
    kinds = json.loads(out)["memory_by_kind"]
    assert [kind["pipeline_rank"] for kind in kinds] == ([0, 1] if words else [0])
    for kind in kinds:
        assert sum(kind["parts_bytes"].values()) == kind["peak_bytes"]
        assert ("optimizer" in kind["parts_bytes"]) == ("--fsdp.cpu_offload" not in words)
    _, out, _ = run(capsys, *command)
    shown = {line[:24].strip(): line[24:].split() for line in out.splitlines()}
    assert shown["in all"] == [f"{kind['peak_bytes'] / 2**30:.2f}" for kind in kinds]
    left = [80 - (kind["peak_bytes"] + kind["communicators_bytes"] + CONTEXT_BYTES) / 2**30 for kind in kinds]
    assert shown["left of a GPU's"] == [f"{gib:.2f}" for gib in left]


def test_a_job_that_does_not_fit_says_so_first(capsys):
    code, out, _ = run(capsys, "llama_1b.toml", "--ranks", "8", "--device", "h100", "--memory-gib", "20")
    assert code == 0
    first = next(line for line in out.splitlines() if line.strip())
    assert first.startswith("does not fit: the job needs about")
    assert "it would take about" in " ".join(out.split())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--device", "h1000"], 'the rates of the device "h1000" are unknown; known are a100, b200, cpu, h100'),
        (["--price", "2"], "--price needs a time"),
        (["--device", "h100", "--training.compute_dtype", "float32"], "80 GB is estimated for training.compute_dtype"),
        (["--device", "cpu"], "add --training.compute_dtype float32 for what that would take"),
        (["--device", "cpu", "--tune"], "--tune searches for GPUs"),
    ],
)
def test_what_cannot_be_estimated_is_said_in_one_message(capsys, words, message):
    code, out, err = run(capsys, "llama_8b.toml", "--ranks", "8", *words)
    assert code != 0
    assert message in " ".join((out + err).split())
    assert "Traceback" not in out + err


@pytest.mark.parametrize("price", ["0", "-1", "nan", "free"])
def test_a_price_is_above_0(price, capsys):
    with pytest.raises(SystemExit):
        run(capsys, "llama_8b.toml", "--ranks", "8", "--device", "h100", "--price", price)
    assert "--price" in capsys.readouterr().err


def test_a_device_without_float8_refuses_it():
    with pytest.raises(UserError, match="has no float8 products"):
        estimate_step(job("llama_8b.toml", 8, "--float8.recipe tensorwise"), 8, device_named("a100"))


def test_an_unknown_device_is_an_error_of_the_user():
    with pytest.raises(UserError, match="h200"):
        device_named("tpu")


# --------------------------------------------------------------------------- the truth


def test_places_are_shared_by_equal_values():
    assert rank_correlation([(1, 10), (2, 20), (3, 30)]) == pytest.approx(1)
    assert rank_correlation([(1, 30), (2, 20), (3, 10)]) == pytest.approx(-1)
    assert rank_correlation([(1, 1), (1, 2), (2, 3)]) == pytest.approx(0.866, abs=1e-3)


@pytest.mark.slow
def test_published_steps_are_predicted_in_their_order_and_near():
    rows = list(compared())
    assert len(rows) >= 30
    assert rank_correlation([(row.predicted, row.published) for row in rows]) >= 0.9
    assert median(abs(row.error) for row in rows) <= 0.16
