"""The rates of one's own GPU, measured in about half a minute: a row like those of configs/rates/devices.toml.

`keel plan --calibrate` measures what the job asks for: its matrix products, its attention, its Gated DeltaNet, a copy,
one to the host, and between the visible GPUs a collective. Each is repeated for about two seconds, so that the power
limit counts, on random values, since zeros take less power. What one host cannot tell (the link to other hosts, the
data sheet's peak, the share of the multiprocessors that a collective takes) is a known row's.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from configs.architectures.llama_keys import Delta, delta_of
from configs.architectures.parts import head_dim, n_kv_heads
from configs.errors import UserError
from configs.layout import mesh_sizes, mixed_elements
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

_SECONDS = 2.0
"""How long each rate is measured."""
_BATCH = 5
"""Pieces of work queued before the host waits for the device."""
_OTHERWISE = "h100"
"""Row of what is not measured of a GPU that has no row."""
_KERNELS = {"flash2": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
_MOST_TOKENS = 16384
"""Tokens of the longest sequence of which attention is measured."""
_FLOAT8_CAPABILITY = (8, 9)
_MESSAGE = 2**28
_SMALL_MESSAGE = 2**13


def calibrate(config: Config, ranks: int) -> tuple[Device, list[str]]:
    """Measure the first visible GPU, and the link between all of them, at the job's shapes.

    Returns:
        The device, and the names of the rates that were not measured but taken from a known row.

    Raises:
        UserError: there is no GPU.
        ConfigError: the ranks cannot form the mesh.
    """
    if not torch.cuda.is_available():
        raise UserError("--calibrate measures a GPU, and torch sees none here; name a known kind with --device")
    name = torch.cuda.get_device_name()
    known = device_called(name) or device_named(_OTHERWISE)
    layers = LayerTime(config, mesh_sizes(config, ranks), known, 8, 0)
    found: dict[str, Any] = dict(_products(layers)) | {"memory": _copy(), "host": _copy_to_host()}
    if attention := _attention(config, layers):
        found["attention"] = attention
    delta = _delta(config, layers)
    found["delta"] = dict(known.delta) | delta
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
        **found,
    )
    measurable = ("products", "products_float8", "grouped", "attention", "inside", "between", "collective_share")
    taken = [each for each in measurable if each not in found]
    return device, [*taken, *(f"delta by {backend}" for backend in known.delta if backend not in delta)]


def seconds_of(work: Callable[[], object]) -> float:
    """Mean seconds of a piece of work on the GPU, repeated for a while."""
    for _ in range(3):
        work()
    torch.cuda.synchronize()
    times = 0
    started = time.perf_counter()
    while (elapsed := time.perf_counter() - started) < _SECONDS or not times:
        for _ in range(_BATCH):
            work()
        torch.cuda.synchronize()
        times += _BATCH
    return elapsed / times


# --------------------------------------------------------------------------- products


def _products(layers: LayerTime) -> Iterator[tuple[str, float]]:
    """FLOP/s of a layer's products in bfloat16, in float8 if the GPU has it, and of experts."""
    every = {(each.rows, each.inputs, each.outputs): each for n in layers.memory.layers for each in layers.matrices(n)}
    plain = [each for each in every.values() if not each.is_grouped]
    grouped = [each for each in every.values() if each.is_grouped]
    if plain:
        yield "products", _rate(plain, _product)
    if torch.cuda.get_device_capability() < _FLOAT8_CAPABILITY:
        yield "products_float8", 0.0
    elif in_float8 := [each for each in plain if int(each.inputs) % 16 == int(each.outputs) % 16 == 0]:
        yield "products_float8", _rate(in_float8, _float8_product)
    if grouped:
        experts = max(1, (layers.config.model.n_experts or 1) // layers.sizes.ep)
        yield "grouped", _rate(grouped, lambda rows, inputs, outputs: _grouped(rows, inputs, outputs, experts))


def _rate(matrices: list[Matrix], product: Callable[[int, int, int], Callable[[], object]]) -> float:
    works = [product(int(each.rows), int(each.inputs), int(each.outputs)) for each in matrices]
    flops = sum(2 * int(each.rows) * int(each.inputs) * int(each.outputs) for each in matrices)
    return flops / seconds_of(lambda: [work() for work in works])


def _random(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def _product(rows: int, inputs: int, outputs: int) -> Callable[[], object]:
    left = _random(rows, inputs)
    right = _random(outputs, inputs)
    return lambda: left @ right.T


def _float8_product(rows: int, inputs: int, outputs: int) -> Callable[[], object]:
    left, right = (_random(*shape).to(torch.float8_e4m3fn) for shape in ((rows, inputs), (outputs, inputs)))
    one = torch.ones((), device="cuda")
    whole = F.ScalingType.TensorWise
    return lambda: F.scaled_mm(left, right.T, one, whole, one, whole)


def _grouped(rows: int, inputs: int, outputs: int, experts: int) -> Callable[[], object]:
    left = _random(rows, inputs)
    right = _random(experts, outputs, inputs)
    counts = torch.full((experts,), rows // experts, device="cuda")
    counts[0] += rows % experts
    return lambda: grouped_mm(left, right, counts)


# --------------------------------------------------------------------------- the rest


def _copy() -> float:
    """Bytes/s that a copy of 0.5 GB reads and writes."""
    source = torch.empty(2**29, device="cuda", dtype=torch.uint8)
    target = torch.empty_like(source)
    return 2 * len(source) / seconds_of(lambda: target.copy_(source))


def _copy_to_host() -> float:
    """Bytes/s of a copy of 0.5 GB to pinned memory, as a save makes it."""
    source = torch.empty(2**29, device="cuda", dtype=torch.uint8)
    target = torch.empty(2**29, dtype=torch.uint8, pin_memory=True)
    return len(source) / seconds_of(lambda: target.copy_(source, non_blocking=True))


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
    q, k, v = (_random(batch, n, seq_len, width).requires_grad_() for n in (heads[0], heads[1], heads[1]))

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
    if computes_by_kernels(config, torch.device("cuda")):
        rules["fla"] = by_kernels
    return {name: _delta_rates(rule, config, layers, places[0]) for name, rule in rules.items()}


def _delta_rates(rule: Rule, config: Config, layers: LayerTime, layer: int) -> list[float]:
    delta = delta_of(config.model, layer)
    assert delta is not None
    seq_len = min(config.training.seq_len, _MOST_TOKENS)
    batch = max(1, layers.tokens // seq_len)
    heads = delta.key_heads // layers.sizes.tp
    given = delta_inputs(batch, seq_len, heads, delta)
    out = rule(*given, None)
    gradient = torch.randn_like(out)
    ahead = seconds_of(lambda: rule(*given, None))
    back = seconds_of(lambda: torch.autograd.grad(out, given, gradient, retain_graph=True))
    flops = 2 * mixed_elements(config.model, layer, 0) * batch * seq_len * heads / delta.key_heads
    return [flops / ahead, 2 * flops / back]


def delta_inputs(
    batch: int, seq_len: int, key_heads: int, delta: Delta
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """What `models.delta.Rule` takes, at random."""
    keys = batch, seq_len, key_heads
    values = *keys, delta.value_heads // delta.key_heads
    q, k = (F.normalize(torch.randn(*keys, delta.key_head_dim, device="cuda"), dim=-1) for _ in range(2))
    v = torch.randn(*values, delta.value_head_dim, device="cuda")
    log_decay = -torch.rand(values, device="cuda")
    strength = torch.rand(values, device="cuda")
    for each in (q, k, v, log_decay, strength):
        each.requires_grad_()
    return q, k, v, log_decay, strength


def _link() -> Link:
    """All-gathers between all visible GPUs, each in a process of its own."""
    gpus = torch.cuda.device_count()
    pool = RankPool(gpus, timeout_seconds=300, backend="cpu:gloo,cuda:nccl")
    try:
        large, small = pool.run(gpus, _gather)[0]
    finally:
        pool.close()
    sent = _MESSAGE * (gpus - 1) / gpus
    return Link(sent / large, small / (gpus - 1))


def _gather() -> tuple[float, float]:
    """Seconds of a large and of a small all-gather, on each rank."""
    torch.cuda.set_device(dist.get_rank())
    found = []
    for n_bytes, times in ((_MESSAGE, 20), (_SMALL_MESSAGE, 200)):
        whole = torch.empty(n_bytes, device="cuda", dtype=torch.uint8)
        part = torch.empty(n_bytes // dist.get_world_size(), device="cuda", dtype=torch.uint8)
        whole = whole[: len(part) * dist.get_world_size()]
        for timed in (False, True):  # the first makes the communicator; as many calls on each rank
            torch.cuda.synchronize()
            started = time.perf_counter()
            for _ in range(times if timed else 3):
                dist.all_gather_into_tensor(whole, part)
            torch.cuda.synchronize()
        found.append((time.perf_counter() - started) / times)
    return found[0], found[1]


# --------------------------------------------------------------------------- what is shown and written


def calibration_rows(device: Device, not_measured: list[str]) -> list[Row]:
    """What was measured, beside the row of that GPU in configs/rates/devices.toml if there is one."""
    known = device_called(device.names[0])
    at = next(iter(device.attention.values()))[0][:2]
    expected = _rates(known, *at) if known else {}
    rows = []
    for label, rate in _rates(device, *at).items():
        if rate and not label.startswith(tuple(not_measured)):
            there = expected.get(label)
            beside = f", {_rate_text(label, there)} in the table ({percent(rate / there - 1)})" if there else ""
            rows.append((label, _rate_text(label, rate) + beside))
    return [*rows, _not_measured(known, not_measured)]


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
    return f"{rate / 1e9:,.0f} GB/s" if name in ("memory", "host", "inside a host") else f"{count(rate)}FLOP/s"


def row_text(device: Device, not_measured: list[str]) -> str:
    """The row as a file for `keel plan --device FILE`."""
    values = asdict(device)
    name = values.pop("name")
    links = {place: values.pop(place) for place in ("inside", "between")}
    table = {"links": links, "devices": {name: {place: place for place in links} | values}}
    taken = " ".join(_not_measured(device_called(device.names[0]), not_measured))
    return f"# Measured by keel plan --calibrate; {taken}.\n\n{table_text(table)}"
