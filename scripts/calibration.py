"""The rates of one's own GPU, or of a CPU, measured in about half a minute: a row as in configs/rates/devices.toml.

`keel plan --calibrate` measures what the job asks for: its matrix products, its attention, its Gated DeltaNet, a copy,
one to the host, and between the visible GPUs a collective. Each is repeated for about two seconds, so that the power
limit counts, on random values, since zeros take less power. What one host cannot tell (the link to other hosts, the
data sheet's peak, the share of the multiprocessors that a collective takes) is a known row's.

On a CPU, as many ranks as the job has on this host measure at the same time, each with its threads, since they share
caches and memory. Elementwise kernels are measured on activations of the job's size, which may be in a cache.
"""

import os
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import closing, suppress
from dataclasses import asdict, replace
from functools import partial
from statistics import mean
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from configs.architectures.llama_keys import Delta, delta_of
from configs.architectures.parts import head_dim, n_kv_heads
from configs.layout import mesh_sizes, mixed_elements
from configs.machine import available_cores
from configs.reading.toml_text import table_text
from configs.schema import Config
from models.delta import Rule, outputs
from models.grouped_mm import grouped_mm
from parallelisms.attention.delta import by_kernels, computes_by_kernels
from scripts.rank_pool import RankPool
from trainer.planning.devices import Device, Link, device_called, device_named
from trainer.planning.flops import peak_flops
from trainer.planning.layer_time import LayerTime, Matrix
from trainer.report.console import Row
from trainer.report.units import count, percent

_all_gather = dist.all_gather_single if hasattr(dist, "all_gather_single") else dist.all_gather_into_tensor
_SECONDS = 2.0
"""How long each rate is measured."""
_SECONDS_OF_CPU = 0.7
_BATCH = 5
"""Pieces of work queued before the host waits for the device."""
_OTHERWISE = "h100"
"""Row of what is not measured of a GPU that has no row."""
_KERNELS = {"flash2": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
_MOST_TOKENS = 16384
"""Tokens of the longest sequence of which attention is measured."""
_FLOAT8_CAPABILITY = (8, 9)
_MESSAGE = 2**28
_MESSAGE_OF_CPU = 2**23
_KERNELS_OF_A_LAUNCH = 20
_SMALL_MESSAGE = 2**13


def calibrate(config: Config, ranks: int) -> tuple[Device, list[str]]:
    """Measure the first visible GPU, and the link between all of them, at the job's shapes.

    Returns:
        The device, and the names of the rates that were not measured but taken from a known row.

    Raises:
        ConfigError: the ranks cannot form the mesh.
    """
    if not torch.cuda.is_available():
        return _calibrate_cpu(config, ranks)
    name = torch.cuda.get_device_name()
    known = device_called(name) or device_named(_OTHERWISE)
    layers = LayerTime(config, mesh_sizes(config, ranks), known, 8, 0)
    source = torch.empty(2**29, device="cuda", dtype=torch.uint8)
    found: dict[str, Any] = dict(_products(layers)) | {"memory": 2 * _copy_rate(source, torch.empty_like(source))}
    found["host"] = _copy_rate(source, torch.empty(2**29, dtype=torch.uint8, pin_memory=True))  # as a save makes it
    if attention := _attention(config, layers):
        found["attention"] = attention
    delta = _delta(config, layers)
    if torch.cuda.device_count() > 1:
        found["inside"] = _link()
    peak = peak_flops(name, config.training.model_copy(update={"compute_dtype": "bfloat16"}))
    device = replace(
        known,
        name="calibrated",
        title=f"{name} (calibrated)",
        names=[name],
        memory_gib=round(torch.cuda.get_device_properties(0).total_memory / 2**30, 1),
        peak=dict(known.peak) | {"bfloat16": peak or found.get("products", known.products)},
        delta=dict(known.delta) | delta,
        **found,
    )
    return device, _taken(known, found, delta)


def _taken(known: Device, found: Collection[str], delta: Collection[str]) -> list[str]:
    """The rates of a known row that stand for what was not measured.

    Args:
        known: the row.
        found: names of the rates that were measured.
        delta: backends of which the recurrence was.
    """
    measurable = ("products", "products_float8", "grouped", "attention", "inside", "between", "collective_share")
    taken = [each for each in measurable if each not in found]
    return [*taken, *(f"delta by {backend}" for backend in known.delta if backend not in delta)]


def seconds_of(work: Callable[[], object]) -> float:
    """Seconds of a piece of work on the device, repeated for a while: the mean; the least on a CPU, which is shared."""
    for _ in range(3):
        work()
    _finish()
    times: list[float] = []
    on_gpu = torch.cuda.is_available()
    while sum(times) < (_SECONDS if on_gpu else _SECONDS_OF_CPU):
        started = time.perf_counter()
        for _ in range(_BATCH):
            work()
        _finish()
        times.append(time.perf_counter() - started)
    return (mean(times) if on_gpu else min(times)) / _BATCH


def _finish() -> None:
    """Wait for a GPU; a CPU has finished."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


# --------------------------------------------------------------------------- a CPU


def _calibrate_cpu(config: Config, ranks: int) -> tuple[Device, list[str]]:
    here = min(ranks, available_cores())
    threads = int(os.environ.get("OMP_NUM_THREADS", "0")) or (torch.get_num_threads() if here == 1 else 1)
    with closing(RankPool(here, timeout_seconds=300)) as pool:
        measured = pool.run(here, _measure_cpu, config, ranks, threads)
    return min(measured, key=lambda each: each[0].products)


def _measure_cpu(config: Config, ranks: int, threads: int) -> tuple[Device, list[str]]:
    """The rates of one rank, while others measure theirs; returns what `calibrate` does."""
    torch.set_num_threads(threads)
    dtype = config.training.compute_dtype
    known = replace(device_named("cpu"), compute_dtype=dtype)
    layers = LayerTime(config, mesh_sizes(config, ranks), known, 8, 0)
    found: dict[str, Any] = dict(_products(layers)) | {"memory": _elementwise(layers), "launch": _launch()}
    if config.model.n_heads:
        row = _attention_row(config, layers)
        found["attention"] = {kernel: [row] for kernel in _KERNELS}
    delta = _delta(config, layers)
    if dist.get_world_size() > 1:
        found["inside"] = _link_of_cpus()
    products = found.get("products", known.products)
    source = torch.empty(2**26, dtype=torch.uint8)  # a save's, in small
    device = replace(
        known,
        name="calibrated",
        title=f"CPU, threads a rank: {threads} (calibrated)",
        peak={dtype: products, "float8": 0.0, "memory": found["memory"]},
        host=_copy_rate(source, torch.empty_like(source)),
        delta=dict(known.delta) | delta,
        **found,
    )
    return device, _taken(known, found, delta)


def _elementwise(layers: LayerTime) -> float:
    """Bytes/s that SwiGLU's two kernels read and write, on a micro-batch's activations."""
    left, right = (_random(layers.tokens, layers.config.model.dim, dtype=_dtype(layers)) for _ in range(2))
    return 5 * left.nbytes / seconds_of(lambda: F.silu(left) * right)


def _launch() -> float:
    """Seconds of a kernel with nothing to do, forward or backward."""
    value = torch.ones(1, requires_grad=True)

    def work() -> None:
        result = value
        for _ in range(_KERNELS_OF_A_LAUNCH):
            result = result * value
        result.backward()

    return seconds_of(work) / (2 * _KERNELS_OF_A_LAUNCH)


def _link_of_cpus() -> Link:
    """All-gathers between the ranks of this host."""
    ranks = dist.get_world_size()
    large, small = (
        _gather_seconds(n_bytes, times) for n_bytes, times in ((_MESSAGE_OF_CPU, 10), (_SMALL_MESSAGE, 200))
    )
    return Link(_MESSAGE_OF_CPU * (ranks - 1) / ranks / large, small / (ranks - 1))


# --------------------------------------------------------------------------- products


def _products(layers: LayerTime) -> Iterator[tuple[str, float]]:
    """FLOP/s of a layer's products in bfloat16, in float8 if the GPU has it, and of experts."""
    every = {(each.rows, each.inputs, each.outputs): each for n in layers.memory.layers for each in layers.matrices(n)}
    plain = [each for each in every.values() if not each.is_grouped]
    grouped = [each for each in every.values() if each.is_grouped]
    if plain:
        yield "products", _rate(plain, partial(_product, dtype=_dtype(layers)))
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() < _FLOAT8_CAPABILITY:
        yield "products_float8", 0.0
    elif in_float8 := [each for each in plain if int(each.inputs) % 16 == int(each.outputs) % 16 == 0]:
        yield "products_float8", _rate(in_float8, _float8_product)
    if grouped:
        experts = max(1, (layers.config.model.n_experts or 1) // layers.sizes.ep)
        yield "grouped", _rate(grouped, partial(_grouped, experts=experts, dtype=_dtype(layers)))


def _rate(matrices: list[Matrix], product: Callable[[int, int, int], Callable[[], object]]) -> float:
    works = [product(int(each.rows), int(each.inputs), int(each.outputs)) for each in matrices]
    flops = sum(2 * int(each.rows) * int(each.inputs) * int(each.outputs) for each in matrices)
    return flops / seconds_of(lambda: [work() for work in works])


def _dtype(layers: LayerTime) -> torch.dtype:
    """The type of products, in which their rates are measured."""
    return getattr(torch, layers.device.compute_dtype)


def _random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape, device="cuda" if torch.cuda.is_available() else "cpu", dtype=dtype)


def _product(rows: int, inputs: int, outputs: int, dtype: torch.dtype) -> Callable[[], object]:
    left = _random(rows, inputs, dtype=dtype)
    right = _random(outputs, inputs, dtype=dtype)
    return lambda: left @ right.T


def _float8_product(rows: int, inputs: int, outputs: int) -> Callable[[], object]:
    left, right = (_random(*shape).to(torch.float8_e4m3fn) for shape in ((rows, inputs), (outputs, inputs)))
    one = torch.ones((), device="cuda")
    whole = F.ScalingType.TensorWise
    return lambda: F.scaled_mm(left, right.T, one, whole, one, whole)


def _grouped(rows: int, inputs: int, outputs: int, experts: int, dtype: torch.dtype) -> Callable[[], object]:
    left = _random(rows, inputs, dtype=dtype)
    right = _random(experts, outputs, inputs, dtype=dtype)
    counts = torch.full((experts,), rows // experts, device=left.device)
    counts[0] += rows % experts
    return lambda: grouped_mm(left, right, counts)


# --------------------------------------------------------------------------- the rest


def _copy_rate(source: Tensor, target: Tensor) -> float:
    """Bytes/s of a copy; those that are read, or those that are written."""
    return source.nbytes / seconds_of(lambda: target.copy_(source, non_blocking=True))


def _attention(config: Config, layers: LayerTime) -> dict[str, list[list[float]]]:
    """A row for each kernel that the GPU has; the other kernel's where it has one alone."""
    if not config.model.n_heads:
        return {}
    found = {}
    for kernel, backend in _KERNELS.items():
        with suppress(RuntimeError), sdpa_kernel(backend):  # "No available kernel"
            found[kernel] = [_attention_row(config, layers)]
    return {kernel: found.get(kernel) or next(iter(found.values())) for kernel in _KERNELS} if found else {}


def _attention_row(config: Config, layers: LayerTime) -> list[float]:
    """Head size, tokens, and FLOP/s of the causal half, forward and backward."""
    seq_len = min(config.training.seq_len, _MOST_TOKENS)
    width = head_dim(config.model)
    batch = max(1, layers.tokens // seq_len)
    heads = [max(1, n // layers.sizes.tp) for n in (config.model.n_heads, n_kv_heads(config.model))]
    dtype = _dtype(layers)
    q, k, v = (_random(batch, n, seq_len, width, dtype=dtype).requires_grad_() for n in (heads[0], heads[1], heads[1]))

    def forward() -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=heads[0] != heads[1])

    flops = 2 * batch * heads[0] * seq_len**2 * width
    out = forward()
    gradient = torch.randn_like(out)
    ahead = seconds_of(forward)
    back = seconds_of(lambda: torch.autograd.grad(out, (q, k, v), gradient, retain_graph=True))
    return [width, seq_len, flops / ahead, 2.5 * flops / back]


def _delta(config: Config, layers: LayerTime) -> dict[str, list[float]]:
    """FLOP/s of the recurrence of Gated DeltaNet, forward and backward: by torch and where they run by kernels."""
    places = [layer for layer in range(config.model.n_layers) if delta_of(config.model, layer)]
    if not places:
        return {}
    rules = {"torch": outputs}
    if computes_by_kernels(config, torch.device(layers.device.type)):
        rules["fla"] = by_kernels
    return {name: _delta_rates(rule, config, layers, places[0]) for name, rule in rules.items()}


def _delta_rates(rule: Rule, config: Config, layers: LayerTime, layer: int) -> list[float]:
    delta = delta_of(config.model, layer)
    assert delta is not None
    seq_len = min(config.training.seq_len, _MOST_TOKENS)
    batch = max(1, layers.tokens // seq_len)
    heads = delta.key_heads // layers.sizes.tp
    given = delta_inputs(batch, seq_len, heads, delta)
    out = rule(*given, None, None)
    gradient = torch.randn_like(out)
    ahead = seconds_of(lambda: rule(*given, None, None))
    back = seconds_of(lambda: torch.autograd.grad(out, given, gradient, retain_graph=True))
    flops = 2 * mixed_elements(config.model, layer, 0) * batch * seq_len * heads / delta.key_heads
    return [flops / ahead, 2 * flops / back]


def delta_inputs(
    batch: int, seq_len: int, key_heads: int, delta: Delta
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """What `models.delta.Rule` takes, at random."""
    keys = batch, seq_len, key_heads
    values = *keys, delta.value_heads // delta.key_heads
    q, k = (F.normalize(_random(*keys, delta.key_head_dim, dtype=torch.float32), dim=-1) for _ in range(2))
    v = _random(*values, delta.value_head_dim, dtype=torch.float32)
    log_decay = -torch.rand(values, device=v.device)
    strength = torch.rand(values, device=v.device)
    for each in (q, k, v, log_decay, strength):
        each.requires_grad_()
    return q, k, v, log_decay, strength


def _link() -> Link:
    """All-gathers between all visible GPUs, each in a process of its own."""
    gpus = torch.cuda.device_count()
    with closing(RankPool(gpus, timeout_seconds=300, backend="cpu:gloo,cuda:nccl")) as pool:
        large, small = pool.run(gpus, _gather)[0]
    sent = _MESSAGE * (gpus - 1) / gpus
    return Link(sent / large, small / (gpus - 1))


def _gather() -> tuple[float, float]:
    """Seconds of a large and of a small all-gather, on each rank."""
    torch.cuda.set_device(dist.get_rank())
    return _gather_seconds(_MESSAGE, 20), _gather_seconds(_SMALL_MESSAGE, 200)


def _gather_seconds(n_bytes: int, times: int) -> float:
    """Mean seconds of an all-gather of so many bytes in all."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    part = torch.empty(n_bytes // dist.get_world_size(), device=device, dtype=torch.uint8)
    whole = torch.empty(len(part) * dist.get_world_size(), device=device, dtype=torch.uint8)
    for timed in (False, True):  # the first makes the communicator; as many calls on each rank
        _finish()
        started = time.perf_counter()
        for _ in range(times if timed else 3):
            _all_gather(whole, part)
        _finish()
    return (time.perf_counter() - started) / times


# --------------------------------------------------------------------------- what is shown and written


def calibration_rows(device: Device, not_measured: list[str]) -> list[Row]:
    """What was measured, beside the row of that GPU in configs/rates/devices.toml if there is one."""
    known = _known(device)
    at = next(iter(device.attention.values()))[0][:2]
    expected = _rates(known, *at) if known else {}
    rows = []
    for label, rate in _rates(device, *at).items():
        if rate and not label.startswith(tuple(not_measured)):
            there = expected.get(label)
            beside = f", {_rate_text(label, there)} in the table ({percent(rate / there - 1)})" if there else ""
            rows.append((label, _rate_text(label, rate) + beside))
    return [*rows, _not_measured(known, not_measured)]


def _known(device: Device) -> Device | None:
    """The row of that GPU, or of a CPU."""
    return device_called(device.names[0]) if device.names else device_named("cpu")


def _not_measured(known: Device | None, names: list[str]) -> Row:
    return "not measured", f"as in the row {known.name if known else _OTHERWISE}: {', '.join(names)}"


def _rates(device: Device, width: float, seq_len: float) -> dict[str, float]:
    """Rates by label, which begins with a field's name; of attention those at a head size and length."""
    rates = {name: getattr(device, name) for name in ("products", "products_float8", "grouped", "memory", "host")}
    for kernel in device.attention:
        ahead, back = device.attention_rates(kernel, int(width), seq_len)
        rates |= {f"attention by {kernel}, forward": ahead, f"attention by {kernel}, backward": back}
    for backend, (ahead, back) in device.delta.items():
        rates |= {f"delta by {backend}, forward": ahead, f"delta by {backend}, backward": back}
    return rates | {"inside a host": device.inside.bandwidth, "inside a host, latency": device.inside.latency}


def _rate_text(name: str, rate: float) -> str:
    if name.endswith("latency"):
        return f"{1e6 * rate:.1f} µs"
    if name in ("memory", "host", "inside a host"):
        return f"{rate / 1e9:,.{0 if rate >= 1e10 else 2}f} GB/s"
    return f"{count(rate).replace('B', 'G')}FLOP/s"


def row_text(device: Device, not_measured: list[str]) -> str:
    """The row as a file for `keel plan --device FILE`."""
    values = asdict(device)
    name = values.pop("name")
    links = {place: values.pop(place) for place in ("inside", "between")}
    table = {"links": links, "devices": {name: {place: place for place in links} | values}}
    taken = " ".join(_not_measured(_known(device), not_measured))
    return f"# Measured by keel plan --calibrate; {taken}.\n\n{table_text(table)}"
