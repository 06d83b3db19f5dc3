"""Who owns which parameter: everybody finds the same, and nobody holds much more than another."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.schema import Model
from models import build_model
from parallelisms.owner_partition import assign_owners
from trainer.planning.skeleton import skeleton

SIZES = st.dictionaries(st.text(max_size=3), st.integers(0, 1000), max_size=12)


@given(SIZES, st.integers(1, 5), st.randoms())
def test_owners_depend_on_names_and_sizes_alone(sizes, ranks, random):
    shuffled = list(sizes.items())
    random.shuffle(shuffled)
    assert assign_owners(dict(shuffled), [0] * ranks) == assign_owners(sizes, [0] * ranks)


@given(SIZES, st.lists(st.integers(0, 100), min_size=1, max_size=5))
def test_no_rank_gets_a_parameter_while_another_has_less(sizes, loads):
    """Seen from any rank: before its last parameter came, it had no more than what any other rank ends with."""
    owners = assign_owners(sizes, loads)
    totals = list(loads)
    for name, owner in owners.items():
        totals[owner] += sizes[name]
    for rank in set(owners.values()):
        last = min((name for name, owner in owners.items() if owner == rank), key=lambda name: sizes[name])
        assert totals[rank] - sizes[last] <= min(totals)


def test_equal_sizes_go_by_name_and_rank():
    assert assign_owners({"b": 3, "c": 3, "a": 3, "d": 9}, [0, 0, 0]) == {"d": 0, "a": 1, "b": 2, "c": 1}


@pytest.mark.parametrize("tied", [False, True])
def test_llama_7b_is_shared_out_evenly(tied):
    model = Model(dim=4096, n_layers=32, n_heads=32, ffn_dim=11008, vocab_size=32000, tie_embeddings=tied)
    shapes = skeleton(model).shapes
    elements = {name: shape[0] * (shape[1] if len(shape) > 1 else 1) for name, shape in shapes.items()}
    totals = [0] * 8
    for name, owner in assign_owners(elements, totals).items():
        totals[owner] += elements[name]
    assert max(totals) < 1.02 * sum(totals) / 8


def test_the_hidden_matrices_are_those_of_the_blocks():
    """The memory estimate goes by names; the trainer by the model's plan."""
    model = build_model(Model(dim=8, n_layers=2, n_heads=2, ffn_dim=8, vocab_size=8))
    in_blocks = tuple(f"{block}." for block in model.plan.blocks)
    by_plan = {name for name, p in model.named_parameters() if p.ndim == 2 and name.startswith(in_blocks)}
    assert by_plan == {n for n, _ in model.named_parameters() if n.startswith("layers.") and "norm" not in n}
