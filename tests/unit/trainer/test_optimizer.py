"""AdamW and Lion against their formulas written out, the parameter groups, and the state that a checkpoint takes."""

import math

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from configs.errors import ConfigError
from configs.load import load
from configs.schema import Optimizer, ParameterGroup
from parallelisms.sums.exact import ExactSums
from parallelisms.sums.fast import Sums
from trainer.optimizers import adamw, muon, training
from trainer.optimizers.ademamix import slow_rates
from trainer.optimizers.build import build_optimizer, frozen_until, optimizer_state, saved_weights, set_lr

SHAPES = {
    "embed_tokens.weight": (7, 4),
    "layers.0.input_layernorm.weight": (4,),
    "layers.0.mlp.up_proj.weight": (6, 4),
    "norm.weight": (4,),
}


def _parameters(dtype: torch.dtype = torch.float64) -> dict[str, Parameter]:
    generator = torch.Generator().manual_seed(1)
    return {name: Parameter(torch.randn(shape, generator=generator, dtype=dtype)) for name, shape in SHAPES.items()}


def _set_gradients(parameters: dict[str, Parameter], step: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    gradients = [torch.randn(p.shape, generator=generator, dtype=p.dtype) for p in parameters.values()]
    for parameter, gradient in zip(parameters.values(), gradients, strict=True):
        parameter.grad = gradient
    return gradients


def _adamw(weight: Tensor, gradients: list[Tensor], lrs: list[float], decay: float, config: Optimizer) -> Tensor:
    """Loshchilov and Hutter 2019, algorithm 2, line by line."""
    beta1, beta2 = config.betas
    m = v = torch.zeros_like(weight)
    for t, (g, lr) in enumerate(zip(gradients, lrs, strict=True), start=1):
        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * g**2
        m_hat, v_hat = m / (1 - beta1**t), v / (1 - beta2**t)
        weight = weight - lr * (m_hat / (v_hat.sqrt() + config.eps) + decay * weight)
    return weight


def _lion(weight: Tensor, gradients: list[Tensor], lrs: list[float], decay: float, config: Optimizer) -> Tensor:
    """Chen et al. 2023, algorithm 2, line by line."""
    beta1, beta2 = config.betas
    m = torch.zeros_like(weight)
    for g, lr in zip(gradients, lrs, strict=True):
        c = beta1 * m + (1 - beta1) * g
        weight = weight - lr * (c.sign() + decay * weight)
        m = beta2 * m + (1 - beta2) * g
    return weight


def test_lion_is_its_formula():
    config = Optimizer(name="lion", lr=1e-2, betas=[0.9, 0.99], weight_decay=0.3)
    parameters, start = _parameters(), _parameters()
    optimizer = build_optimizer(config, list(parameters.items()))
    lrs = [1e-2, 7e-3, 5e-3]
    history: list[list[Tensor]] = []
    for step, lr in enumerate(lrs):
        history.append(_set_gradients(parameters, step))
        set_lr(optimizer, lr)
        optimizer.step()
    for index, (name, parameter) in enumerate(parameters.items()):
        decay = config.weight_decay if parameter.ndim == 2 else 0.0
        gradients = [of_step[index] for of_step in history]
        expected = _lion(start[name].detach(), gradients, lrs, decay, config)
        torch.testing.assert_close(parameter.detach(), expected, rtol=1e-14, atol=1e-14)
    state = optimizer_state(optimizer, parameters)
    assert state.keys() == {f"optimizer.{name}.exp_avg" for name in parameters}


def test_a_kernel_skips_and_divides_by_what_is_on_the_device():
    """Steps 1 and 2 are skipped, one of them with gradients that are not finite; step 3 is clipped by 4."""
    by_kernel, by_hand = _parameters(torch.float32), _parameters(torch.float32)
    optimizer, other = (build_optimizer(Optimizer(lr=1e-2), list(p.items())) for p in (by_kernel, by_hand))
    start = {name: parameter.detach().clone() for name, parameter in by_kernel.items()}
    yes, no, four = torch.tensor(1.0), torch.tensor(0.0), torch.tensor(4.0)
    for step in (1, 2):
        _set_gradients(by_kernel, step)
        if step == 2:
            by_kernel["norm.weight"].grad.fill_(math.nan)
        optimizer.step(skip=yes, divisor=four)
    assert all(torch.equal(by_kernel[name], start[name]) for name in start)
    assert not any(tensor.any() for tensor in optimizer_state(optimizer, by_kernel).values())
    _set_gradients(by_kernel, 3)
    optimizer.step(skip=no, divisor=four)
    for gradient in _set_gradients(by_hand, 3):
        gradient /= 4
    other.step()
    assert all(torch.equal(by_kernel[name], by_hand[name]) for name in start)
    states = optimizer_state(optimizer, by_kernel), optimizer_state(other, by_hand)
    assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])


def test_follows_the_formula_with_groups():
    groups = [ParameterGroup(pattern="embed*", lr_scale=0.5), ParameterGroup(pattern="norm.weight", weight_decay=0.3)]
    config = Optimizer(lr=1e-2, betas=[0.8, 0.9], eps=1e-6, weight_decay=0.2, groups=groups)
    parameters = _parameters()
    start = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    optimizer = build_optimizer(config, list(parameters.items()))
    gradients: dict[str, list[Tensor]] = {name: [] for name in parameters}
    lrs = [1e-2, 3e-2, 2e-2, 5e-3]
    for step, lr in enumerate(lrs):
        for name, gradient in zip(parameters, _set_gradients(parameters, step), strict=True):
            gradients[name].append(gradient.clone())
        set_lr(optimizer, lr)
        optimizer.step()
    settings = {  # learning rate factor, weight decay
        "embed_tokens.weight": (0.5, 0.2),
        "layers.0.input_layernorm.weight": (1.0, 0.0),
        "layers.0.mlp.up_proj.weight": (1.0, 0.2),
        "norm.weight": (1.0, 0.3),
    }
    for name, (scale, decay) in settings.items():
        expected = _adamw(start[name], gradients[name], [lr * scale for lr in lrs], decay, config)
        torch.testing.assert_close(parameters[name].detach(), expected, rtol=1e-13, atol=1e-13)


def test_first_matching_group_wins():
    groups = [ParameterGroup(pattern="layers.*norm*", lr_scale=2.0), ParameterGroup(pattern="*norm*", lr_scale=3.0)]
    parameters = _parameters()
    optimizer = build_optimizer(Optimizer(lr=1.0, groups=groups), list(parameters.items()))
    lr = {id(parameter): group["lr"] for group in optimizer.param_groups for parameter in group["params"]}
    assert [lr[id(parameter)] for parameter in parameters.values()] == [1.0, 2.0, 1.0, 3.0]


def test_what_is_frozen_has_no_state_or_a_state_of_zeros():
    groups = [
        ParameterGroup(pattern="layers.*", freeze=True),
        ParameterGroup(pattern="norm.*", freeze_until_step=3),
    ]
    config, parameters = Optimizer(lr=1.0, groups=groups, weight_decay=0.5), _parameters()
    names = list(parameters)
    assert frozen_until(config, names) == {names[1]: math.inf, names[2]: math.inf, "norm.weight": 3}
    optimizer = build_optimizer(config, list(parameters.items()))
    state = optimizer_state(optimizer, parameters)
    assert {name.rpartition(".")[0] for name in state} == {"optimizer.embed_tokens.weight", "optimizer.norm.weight"}
    assert not any(tensor.any() for tensor in state.values())
    assert saved_weights(optimizer, parameters).keys() == parameters.keys()


def test_freezing_everything_is_an_error():
    groups = [ParameterGroup(pattern="*.weight", freeze_until_step=1)]
    with pytest.raises(ConfigError, match="step 1 would train nothing"):
        frozen_until(Optimizer(lr=1.0, groups=groups), list(SHAPES))


def test_a_pattern_that_matches_nothing_is_an_error():
    groups = [ParameterGroup(pattern="*"), ParameterGroup(pattern="layers.*.mlp.upproj.weight")]
    with pytest.raises(ConfigError, match=r"groups\[1\].*upproj.*matches no.*nearest.*layers\.0\.mlp\.up_proj\.weight"):
        build_optimizer(Optimizer(lr=1.0, groups=groups), list(_parameters().items()))


def test_a_pattern_shadowed_by_earlier_ones_is_an_error():
    groups = [ParameterGroup(pattern="*"), ParameterGroup(pattern="norm.weight")]
    with pytest.raises(ConfigError, match=r"groups\[1\].*earlier patterns"):
        build_optimizer(Optimizer(lr=1.0, groups=groups), list(_parameters().items()))


def test_the_state_is_there_from_the_start_and_as_torch_makes_it():
    parameters, by_torch = _parameters(torch.float32), _parameters(torch.float32)
    optimizer = build_optimizer(Optimizer(lr=1e-2), list(parameters.items()))
    reference = torch.optim.AdamW(by_torch.values(), lr=1e-2, fused=True)
    before = optimizer_state(optimizer, parameters)
    assert set(before) == {f"optimizer.{name}.{key}" for name in SHAPES for key in ("step", "exp_avg", "exp_avg_sq")}
    assert all(not tensor.any() for tensor in before.values())
    assert all(torch.equal(a, b) for a, b in zip(parameters.values(), by_torch.values(), strict=True))
    _set_gradients(by_torch, 0)
    reference.step()
    for name, parameter in by_torch.items():
        for key, made_by_torch in reference.state[parameter].items():
            ours = before[f"optimizer.{name}.{key}"]
            assert (ours.shape, ours.dtype, ours.device) == (
                made_by_torch.shape,
                made_by_torch.dtype,
                made_by_torch.device,
            )


NARROW = Optimizer(lr=1e-2, rounding="stochastic", weight_decay=0.2)


@pytest.mark.parametrize(
    ("config", "dtype"),
    [
        (Optimizer(lr=1e-2), torch.float32),
        (Optimizer(lr=1e-2, moments_dtype="bfloat16"), torch.float32),
        (NARROW, torch.bfloat16),
    ],
)
def test_a_state_read_in_place_continues_bit_for_bit(config, dtype):
    straight, resumed = _parameters(dtype), _parameters(dtype)
    first = build_optimizer(config, list(straight.items()))
    for step in range(3):
        _set_gradients(straight, step)
        first.step()
    saved = {key: tensor.clone() for key, tensor in optimizer_state(first, straight).items()}
    second = build_optimizer(config, list(resumed.items()))
    for name, parameter in straight.items():
        resumed[name].data.copy_(parameter.detach())
    for key, tensor in optimizer_state(second, resumed).items():
        tensor.copy_(saved[key])
    for parameters, optimizer in ((straight, first), (resumed, second)):
        _set_gradients(parameters, 3)
        optimizer.step()
    assert all(torch.equal(straight[name], resumed[name]) for name in SHAPES)
    assert optimizer_state(second, resumed)["optimizer.norm.weight.step"] == 4


ROUNDED = Optimizer(lr=1e-2, moments_dtype="bfloat16", weight_decay=0.2)


def test_moments_in_bfloat16_take_half_and_are_near_those_in_float32():
    rounded, whole = _parameters(torch.float32), _parameters(torch.float32)
    optimizers = [build_optimizer(c, list(p.items())) for c, p in ((ROUNDED, rounded), (Optimizer(lr=1e-2), whole))]
    for step in range(20):
        for parameters, optimizer in zip((rounded, whole), optimizers, strict=True):
            _set_gradients(parameters, step)
            optimizer.step()
    ours, theirs = (optimizer_state(o, p) for o, p in zip(optimizers, (rounded, whole), strict=True))
    assert ours.keys() == theirs.keys()
    for key, tensor in ours.items():
        if key.endswith("step"):
            assert tensor == 20
        else:
            assert tensor.dtype == torch.bfloat16
            scale = theirs[key].abs().max()
            torch.testing.assert_close(tensor.float() / scale, theirs[key] / scale, rtol=0, atol=0.05)


@pytest.mark.parametrize(("config", "dtype"), [(ROUNDED, torch.float32), (NARROW, torch.bfloat16)])
def test_the_seed_and_the_name_choose_how_an_update_is_rounded(config, dtype):
    def rounded(seed: int, name: str) -> Tensor:
        parameter = Parameter(torch.ones(50, 20, dtype=dtype))
        optimizer = build_optimizer(config, [(name, parameter)], seed=seed)
        parameter.grad = torch.linspace(-1, 1, 1000).view(50, 20).to(dtype)
        optimizer.step()
        state = optimizer_state(optimizer, {name: parameter})
        return parameter.detach() if config is NARROW else state[f"optimizer.{name}.exp_avg"]

    assert torch.equal(rounded(1, "a"), rounded(1, "a"))
    assert not torch.equal(rounded(1, "a"), rounded(2, "a"))
    assert not torch.equal(rounded(1, "a"), rounded(1, "b"))


@pytest.mark.parametrize("config", [Optimizer(lr=1e-2), ROUNDED])
def test_copies_are_written_with_the_update(config):
    """Of the parameters that have a gradient."""
    parameters = _parameters(torch.float32)
    optimizer = build_optimizer(config, list(parameters.items()))
    copies = {p: torch.full_like(p, 7.0, dtype=torch.bfloat16) for p in parameters.values()}
    _set_gradients(parameters, 1)
    parameters["norm.weight"].grad = None
    optimizer.step(compute_copies=copies)
    for name, parameter in parameters.items():
        expected = torch.full_like(copies[parameter], 7.0) if name == "norm.weight" else parameter.bfloat16()
        assert torch.equal(copies[parameter], expected), name


def test_which_kernel_updates(monkeypatch):
    monkeypatch.setattr(adamw, "has_triton", lambda: True)
    plain, by_torch = Optimizer(lr=1.0), Optimizer(lr=1.0, kernel="torch")
    rounded_by_torch = ROUNDED.model_copy(update={"kernel": "torch"})
    cases = [  # config, device, type, exact reductions, kernel
        (plain, "cuda", torch.float32, Sums(), "keel"),
        (plain, "cuda", torch.float32, True, "keel"),
        (plain, "cuda", torch.bfloat16, Sums(), "torch"),
        (plain, "cuda", torch.float64, Sums(), "torch"),
        (plain, "cpu", torch.float32, Sums(), "torch"),
        (plain, "cpu", torch.float32, ExactSums(), "padded"),
        (by_torch, "cuda", torch.float32, Sums(), "torch"),
        (ROUNDED, "cuda", torch.float32, Sums(), "keel"),
        (ROUNDED, "cpu", torch.float32, Sums(), "separate"),
        (rounded_by_torch, "cuda", torch.float32, Sums(), "separate"),
        (NARROW, "cuda", torch.bfloat16, Sums(), "keel"),
        (NARROW, "cpu", torch.bfloat16, Sums(), "separate"),
    ]
    for config, *where, expected in cases:
        assert adamw.kernel_of_adamw(config, *where) == expected
    monkeypatch.setattr(adamw, "has_triton", lambda: False)
    assert adamw.kernel_of_adamw(plain, "cuda", torch.float32, Sums()) == "torch"
    assert adamw.kernel_of_adamw(ROUNDED, "cuda", torch.float32, Sums()) == "separate"


def test_muon_moves_weights_in_bfloat16_by_small_steps():
    """Rounded to the nearest, a weight of 1 that each step moves by less than 1/512 would never change."""
    moved = {}
    for rounding in ("nearest", "stochastic"):
        weight = Parameter(torch.ones(64, 64, dtype=torch.bfloat16))
        config = Optimizer(lr=2e-3, name="muon", weight_decay=0.0, rounding=rounding)
        optimizer = build_optimizer(config, [("weight", weight)], {"weight": 1})
        weight.grad = torch.randn(64, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
        for _ in range(20):
            optimizer.step()
        moved[rounding] = weight.detach().double() - 1
    assert not moved["nearest"].any()
    whole = Parameter(torch.ones(64, 64))
    optimizer = build_optimizer(Optimizer(lr=2e-3, name="muon", weight_decay=0.0), [("weight", whole)], {"weight": 1})
    whole.grad = weight.grad.float()
    for _ in range(20):
        optimizer.step()
    expected = whole.detach().double() - 1
    # The mean of 2,048 elements: a last bit of at most 1/128, rounded 20 times.
    for side in (expected > 0, expected < 0):
        assert abs((moved["stochastic"] - expected)[side].mean()) < 5 * 20**0.5 / 128 / 2 / 2048**0.5
        assert abs(expected[side].mean()) > 2e-3


def test_normalized_rows_move_alike():
    """Orthogonal tall matrices have rows of different lengths; NorMuon without an average makes them equal."""
    for neuron_beta, spread in ((None, 0.2), (0.0, 1e-6)):
        weights = {name: Parameter(torch.zeros(96, 16)) for name in ("weight", "without_gradient", "heads")}
        config = Optimizer(lr=1.0, name="muon", weight_decay=0.0, neuron_beta=neuron_beta)
        optimizer = build_optimizer(config, list(weights.items()), {"weight": 1, "without_gradient": 1, "heads": 3})
        weights["weight"].grad = torch.randn(96, 16, generator=torch.Generator().manual_seed(0))
        weights["without_gradient"].grad = torch.zeros(96, 16)
        weights["heads"].grad = weights["weight"].grad * torch.linspace(0.1, 5, 96)[:, None]
        optimizer.step()
        for name in ("weight", "heads"):
            moved = weights[name].detach()
            lengths = moved.norm(dim=1)
            assert (lengths.std() / lengths.mean() < spread) == (neuron_beta is not None)
            assert moved.square().mean().sqrt() == pytest.approx(0.2, rel=0.2 if neuron_beta is None else 1e-5)
        assert not weights["without_gradient"].any()


def test_each_update_by_muon_rounds_in_another_way():
    """With the same random bits at every step, an element would always be rounded up, or always down."""
    weight = Parameter(torch.ones(64, 64, dtype=torch.bfloat16))
    config = Optimizer(lr=2e-3, name="muon", momentum=0.0, rounding="stochastic")
    optimizer = build_optimizer(config, [("weight", weight)], {"weight": 1})
    moved = []
    for _ in range(2):
        weight.data.fill_(1)
        weight.grad = torch.randn(64, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
        optimizer.step()
        moved.append(weight.detach().clone())
    assert not torch.equal(*moved)
    assert optimizer_state(optimizer, {"weight": weight})["optimizer.weight.step"] == 2


def test_lr_scale_stays_with_the_group():
    groups = [ParameterGroup(pattern="norm.weight", lr_scale=0.1)]
    optimizer = build_optimizer(Optimizer(lr=1.0, groups=groups), list(_parameters().items()))
    for lr in (2.0, 4.0):
        set_lr(optimizer, lr)
        assert math.isclose(min(group["lr"] for group in optimizer.param_groups), 0.1 * lr)
        assert max(group["lr"] for group in optimizer.param_groups) == lr


def test_meta_parameters_are_planned_without_memory():
    parameters = {name: Parameter(torch.empty(shape, device="meta")) for name, shape in SHAPES.items()}
    optimizer = build_optimizer(Optimizer(lr=1.0), list(parameters.items()))
    assert optimizer_state(optimizer, parameters)["optimizer.norm.weight.exp_avg"].is_meta


# --------------------------------------------------------------------------- Muon


def _singular_values(matrix):
    return torch.linalg.svdvals(matrix.float())


@pytest.mark.parametrize("shape", [(40, 24), (24, 40), (32, 32)])
def test_polynomials_make_singular_values_about_one(shape):
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0)).bfloat16()
    by_jordan, by_express = map(_singular_values, (muon.newton_schulz(matrix), muon.polar_express(matrix)))
    assert 0.6 < by_jordan.min() <= by_jordan.max() < 1.3
    assert (by_express - 1).abs().mean() < (by_jordan - 1).abs().mean()
    # The directions stay: the nearest orthogonal matrix has the same singular vectors.
    left, _, right = torch.linalg.svd(matrix.float(), full_matrices=False)
    assert (muon.polar_express(matrix).float() - left @ right).norm() < 0.1 * min(shape) ** 0.5


def test_muon_is_torchs():
    config = Optimizer(lr=1e-2, name="muon", weight_decay=0.3)
    ours, theirs = _parameters(torch.float32), _parameters(torch.float32)
    optimizer = build_optimizer(config, list(ours.items()), {name: 1 for name, p in ours.items() if p.ndim == 2})
    matrices = [p for p in theirs.values() if p.ndim == 2]
    plain = torch.optim.Muon(matrices, lr=1e-2, weight_decay=0.3, adjust_lr_fn="match_rms_adamw")
    for step in range(3):
        _set_gradients(ours, step)
        _set_gradients(theirs, step)
        optimizer.step()
        plain.step()
    for name, p in ours.items():
        if p.ndim == 2:
            torch.testing.assert_close(p, theirs[name])


def test_each_head_and_each_expert_is_a_matrix_of_its_own():
    heads, experts = torch.randn(12, 8, dtype=torch.float64), torch.randn(3, 4, 8, dtype=torch.float64)
    gradient = torch.randn(12, 8, dtype=torch.float64)
    together = {"q": Parameter(heads.clone()), "experts": Parameter(heads.clone().view_as(experts))}
    for parameter in together.values():
        parameter.grad = gradient.view_as(parameter)
    apart = {str(i): Parameter(part.clone()) for i, part in enumerate(heads.chunk(3))}
    for parameter, part in zip(apart.values(), gradient.chunk(3), strict=True):
        parameter.grad = part
    config = Optimizer(lr=1e-2, name="muon", cautious_weight_decay=True)
    build_optimizer(config, list(together.items()), dict.fromkeys(together, 3)).step()
    build_optimizer(config, list(apart.items()), dict.fromkeys(apart, 1)).step()
    expected = torch.cat(list(apart.values()))
    assert torch.equal(together["q"], expected)
    assert torch.equal(together["experts"].flatten(end_dim=1), expected)


# --------------------------------------------------------------------------- weight decay


@pytest.mark.parametrize("name", ["adamw", "lion", "muon"])
def test_decay_by_the_schedule_does_not_depend_on_lr(name):
    """Without a gradient's part: the same share of a weight, whatever lr, at half of its peak."""
    for lr in (1e-3, 1e-2):
        groups = [ParameterGroup(pattern="embed*", lr_scale=3.0), ParameterGroup(pattern="layers.0.m*", lr_scale=0.0)]
        config = Optimizer(lr=lr, name=name, weight_decay=0.2, weight_decay_by="schedule", groups=groups)
        parameters = _parameters()
        before = {n: p.detach().clone() for n, p in parameters.items()}
        optimizer = build_optimizer(config, list(parameters.items()), {"layers.0.mlp.up_proj.weight": 1})
        for parameter in parameters.values():
            parameter.grad = torch.zeros_like(parameter)
        set_lr(optimizer, lr / 2)
        optimizer.step()
        torch.testing.assert_close(parameters["embed_tokens.weight"], before["embed_tokens.weight"] * 0.9)
        assert torch.equal(parameters["norm.weight"], before["norm.weight"])
        assert torch.equal(parameters["layers.0.mlp.up_proj.weight"], before["layers.0.mlp.up_proj.weight"])


def test_cautious_decay_is_of_what_moves_to_zero():
    weights = [torch.tensor([1.0, -1.0, 1.0, -1.0, 2.0])]
    training.decay(weights, [torch.tensor([1.0, 1.0, -1.0, -1.0, 0.0])], 0.5, is_cautious=True)
    assert weights[0].tolist() == [0.5, -1.0, 1.0, -0.5, 1.0]


# --------------------------------------------------------------------------- AdEMAMix


def test_ademamix_without_a_slow_average_is_adamw():
    ours, theirs = _parameters(), _parameters()
    optimizers = [
        build_optimizer(Optimizer(lr=1e-2, name="ademamix", slow_weight=0.0), list(ours.items())),
        build_optimizer(Optimizer(lr=1e-2), list(theirs.items())),
    ]
    for step in range(3):
        for parameters, optimizer in zip((ours, theirs), optimizers, strict=True):
            _set_gradients(parameters, step)
            optimizer.step()
    for name, parameter in ours.items():
        torch.testing.assert_close(parameter, theirs[name], rtol=1e-13, atol=1e-13)


def test_the_slow_average_warms_up():
    config = Optimizer(lr=1e-2, name="ademamix", slow_beta=0.999, slow_warmup_steps=100)
    halves = [math.log(0.5) / math.log(slow_rates(config, t)[0]) for t in (1, 50, 99, 100, 1000)]
    start, end = math.log(0.5) / math.log(0.9), math.log(0.5) / math.log(0.999)
    assert halves == pytest.approx([start + (end - start) * share for share in (0.01, 0.5, 0.99, 1, 1)])
    assert [slow_rates(config, t)[1] for t in (1, 50, 100)] == [0.05, 2.5, 5.0]


@pytest.mark.parametrize(("name", "is_tried"), [("adamw", True), ("muon", True), ("lion", False)])
def test_the_kernel_is_tried_at_the_start_where_adamw_updates_some_parameters(monkeypatch, name, is_tried):
    asked = []
    monkeypatch.setattr(adamw, "has_triton", lambda: asked.append(name))
    adamw.require_kernel(load("parity.toml", ("--optimizer.name", name)), torch.device("cuda"))
    assert asked == [name] * is_tried
