"""Moments and weights in bfloat16: the hash by its definition, the rounding by probabilities, AdamW by its formula."""

import math

import pytest
import torch
from torch import Tensor

from parallelisms.part import Part, part_of
from trainer.kernels.keyed import Key, further_bits, key_of, mixed, random_bits, rounded
from trainer.kernels.separate import Rates, power, update

CPU = torch.device("cpu")
RATES = Rates(lr=1e-2, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1)


def whole(n: int) -> Part:
    return part_of(torch.empty(n))


def hashed(word: int, step: int, number: int) -> int:
    """The definition, in Python's integers."""
    first = mixed((word & 0xFFFFFFFF) ^ (step * 0x9E3779B9) % 2**32)
    second = mixed((word >> 32) ^ first)
    beyond = ((number >> 32) * 0x9E3779B9 + second) % 2**32
    return mixed(mixed((number % 2**32) ^ first) ^ beyond)


def test_the_mix_mixes():
    """No two words have the same mix, and a changed bit changes half of the bits."""
    assert len({mixed(word) for word in range(1 << 14)}) == 1 << 14
    assert len({mixed(word << 16) for word in range(1 << 14)}) == 1 << 14
    words = [word * 0x9E3779B9 % 2**32 for word in range(500)]
    for bit in range(32):
        changed = sum((mixed(word) ^ mixed(word ^ 1 << bit)).bit_count() for word in words) / len(words)
        assert 15.3 < changed < 16.7


@pytest.mark.parametrize(
    "part",
    [Part(3, 1, 100, 0, 0), Part(2**32 - 40, 1, 100, 0, 0), Part(2**34 + 5, 7, 3, 1000, 50), Part(7, 25, 4, 0, 9)],
)
def test_bits_are_the_hash_of_the_elements_number_in_the_whole(part):
    key = Key(0xFEDCBA9876543210, part)
    found = [word % 2**32 for word in random_bits(key, 77, 10, 60, CPU).tolist()]
    numbers = [
        part.first + i // part.run // part.rows * part.outer + i // part.run % part.rows * part.inner + i % part.run
        for i in range(10, 60)
    ]
    assert found == [hashed(key.word, 77, number) for number in numbers]
    further = [word % 2**32 for word in further_bits(random_bits(key, 77, 10, 60, CPU)).tolist()]
    assert further == [mixed((word + 0x9E3779B9) % 2**32) for word in found]


def test_bits_depend_on_seed_name_update_and_element_alone():
    def drawn(seed: int = 1, name: str = "a", step: int = 5) -> Tensor:
        return random_bits(key_of(seed, name, whole(1000)), step, 0, 1000, CPU)

    assert torch.equal(drawn(), drawn())
    for other in (drawn(seed=2), drawn(name="b"), drawn(step=6)):
        assert (drawn() == other).float().mean() < 0.01


def test_bits_are_even_and_independent():
    """Each of the 32 bits is 1 half of the time; no two of an element, of neighbors or of updates are correlated.

    So are the further ones.
    """
    n = 1 << 14
    words = [random_bits(key_of(0, "weight", whole(n)), step, 0, n, CPU) for step in (1, 2)]
    words += [words[0].roll(1), further_bits(words[0]), further_bits(words[1]).roll(1)]
    bits = torch.stack([word >> bit & 1 for word in words for bit in range(32)]).double() - 0.5
    assert bits.mean(1).abs().max() < 5 * 0.5 / math.sqrt(n)
    correlations = bits @ bits.T / n * 4 - torch.eye(len(bits))
    assert correlations.abs().max() < 5.5 / math.sqrt(n)


@pytest.mark.parametrize("value", [1.0, -1.0, 1.00001, -3.14159, 1e-40, 3e38, 1e-3])
def test_rounding_is_right_on_average_and_to_a_neighbor(value):
    """Over all 2^16 draws the mean is the value itself."""
    exact = torch.tensor(value)
    results = rounded(exact.expand(1 << 16).contiguous(), torch.arange(1 << 16, dtype=torch.int32)).double()
    assert results.mean().item() == pytest.approx(exact.item(), rel=1e-12)
    below = exact.view(torch.int32).bitwise_and(-0x10000).view(torch.float32).item()
    neighbors = {below, exact.view(torch.int32).bitwise_and(-0x10000).add(0x10000).view(torch.float32).item()}
    assert set(results.unique().tolist()) <= neighbors
    assert len(results.unique()) == (1 if below == exact.item() else 2)


def test_what_is_not_finite_stays():
    values = torch.tensor([math.inf, -math.inf, math.nan, 0.0, -0.0])
    patterns = torch.tensor([0x7FFFFFFF, -1], dtype=torch.int32).view(torch.float32)  # NaN, as NVIDIA's GPUs write it
    for draw in (0, 0xFFFF):
        bits = torch.full((5,), draw, dtype=torch.int32)
        found = rounded(values, bits).float()
        assert found.isposinf().tolist() == [True, False, False, False, False]
        assert found.isneginf().tolist() == [False, True, False, False, False]
        assert found.isnan().tolist() == [False, False, True, False, False]
        assert found[3:].abs().max() == 0
        assert rounded(patterns, bits[:2]).isnan().all()


def test_powers():
    for base in (0.9, 0.95, 0.999, 0.0):
        for exponent in (1, 2, 3, 1000, 2**24 - 1):
            assert power(base, exponent) == pytest.approx(base**exponent, rel=1e-12, abs=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("n", [1, 1000, (1 << 18) + 3])
def test_an_update_follows_the_formula(dtype, n):
    """In float64, from the moments as they were stored; the new moments are one of the two neighbors."""
    torch.manual_seed(n)
    weight, gradient = torch.randn(n, dtype=dtype), torch.randn(n, dtype=dtype)
    m, v = torch.randn(n).mul(0.1).bfloat16(), torch.rand(n).bfloat16()
    before = [each.double().clone() for each in (weight, gradient, m, v)]
    update(weight, gradient, m, v, 3, key_of(1, "w", whole(n)), RATES)
    w, g, m0, v0 = before
    m1, v1 = 0.9 * m0 + 0.1 * g, 0.95 * v0 + 0.05 * g**2
    expected = w - 1e-3 * w - 1e-2 * (m1 / (1 - 0.9**3)) / ((v1 / (1 - 0.95**3)).sqrt() + 1e-8)
    tolerance = {torch.float32: 1e-6, torch.float64: 1e-14}[dtype]
    torch.testing.assert_close(weight.double(), expected, rtol=tolerance, atol=tolerance)
    for stored, exact in ((m, m1), (v, v1)):
        assert ((stored.double() - exact).abs() <= exact.abs() * 2**-7 + 1e-9).all()
    assert torch.equal(gradient.double(), g)


def test_the_second_moment_follows_a_small_change():
    """Rounded to the nearest, a moment of 1 that each step moves by 1e-3 of the way would never change."""
    n, steps = 1024, 200
    weight, gradient = torch.zeros(n), torch.full((n,), 0.5)
    m, v = torch.zeros(n).bfloat16(), torch.ones(n).bfloat16()
    rates = Rates(lr=0.0, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.0)
    key = key_of(0, "w", whole(n))
    for step in range(1, steps + 1):
        update(weight, gradient, m, v, step, key, rates)
    expected = 0.25 + 0.75 * 0.999**steps
    assert v.double().mean().item() == pytest.approx(expected, abs=0.005)
    assert torch.tensor(1 - 0.75e-3).bfloat16() == 1


def test_weights_in_bfloat16_follow_the_formula_to_a_neighbor():
    """Updated in float32 from what was stored; on average they are where the formula brings them."""
    torch.manual_seed(1)
    n = 1 << 16
    weight, gradient = torch.randn(n).bfloat16(), torch.randn(n).bfloat16()
    m, v = torch.randn(n).mul(0.1).bfloat16(), torch.rand(n).bfloat16()
    w, g, m0, v0 = (each.double().clone() for each in (weight, gradient, m, v))
    update(weight, gradient, m, v, 3, key_of(1, "w", whole(n)), RATES)
    m1, v1 = 0.9 * m0 + 0.1 * g, 0.95 * v0 + 0.05 * g**2
    change = -1e-3 * w - 1e-2 * (m1 / (1 - 0.9**3)) / ((v1 / (1 - 0.95**3)).sqrt() + 1e-8)
    assert ((weight.double() - (w + change)).abs() <= (w + change).abs() * 2**-7 + 1e-9).all()
    # Of independent errors below one last bit (0.8% of a weight), the mean is below 5 / sqrt(n) of that.
    assert ((weight.double() - w - change) * change.sign()).mean().abs() < 1.6e-4 < change.abs().mean() / 10


def test_weights_in_bfloat16_follow_small_changes():
    """Rounded to the nearest, a weight of 1 that each step moves by 1e-4 would never change."""
    n, steps = 4096, 100
    weight, gradient = torch.ones(n).bfloat16(), torch.ones(n).bfloat16()
    m, v = torch.ones(n).bfloat16(), torch.ones(n).bfloat16()
    rates = Rates(lr=1e-4, beta1=0.0, beta2=0.0, eps=1e-8, weight_decay=0.0)
    for step in range(1, steps + 1):
        update(weight, gradient, m, v, step, key_of(0, "w", whole(n)), rates)
    assert weight.double().mean().item() == pytest.approx(1 - steps * 1e-4, abs=1e-3)
    assert torch.tensor(1 - 1e-4).bfloat16() == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_update_of_parts_is_that_of_the_whole(dtype):
    """However the whole is cut, also by columns, as tensor parallelism does."""
    torch.manual_seed(0)
    shape = (6, 10)
    start = [each.to(dtype) for each in (torch.randn(shape), torch.randn(shape))]
    start += [torch.randn(shape).bfloat16(), torch.rand(shape).bfloat16()]
    expected = [each.clone() for each in start]
    update(*expected, 2, key_of(5, "w", part_of(torch.empty(shape))), RATES)
    for rows, columns in (((0, 4), (0, 10)), ((4, 6), (0, 10)), ((0, 6), (3, 8)), ((2, 5), (9, 10))):
        cut = slice(*rows), slice(*columns)
        mine = [each[cut].clone(memory_format=torch.contiguous_format) for each in start]
        width = columns[1] - columns[0]
        part = Part(rows[0] * 10 + columns[0], rows[1] - rows[0], width, 0, 10)
        update(*mine, 2, key_of(5, "w", part), RATES)
        assert all(torch.equal(found, each[cut]) for found, each in zip(mine, expected, strict=True))
