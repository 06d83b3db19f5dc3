"""What a rank asks of the one store before its first step: little, and the first rank a fixed number for each other."""

from configs.load import load
from tests.scale.start import NO_TEXT, agreement, heartbeats, mesh, names_of_an_attempt


def test_requests_at_the_start():
    for ranks in (8, 512, 4096):
        assert heartbeats(ranks) <= 8, ranks
        _, requests = names_of_an_attempt(ranks)
        assert requests == 1 + 4 * (ranks - 1)


def test_the_parts_of_a_start_run_on_simulated_ranks():
    job = load("llama_405b.toml", ("--training.global_batch_size", "4096", *NO_TEXT), 4096)
    took, groups = mesh(job, 4096)
    assert groups == 4
    assert took < 10  # 0.2 on a quiet machine; 21,032 calls for groups took 0.5
    assert agreement(job, 4096) < 10  # 0.01
