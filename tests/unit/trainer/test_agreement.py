"""What ranks that differ are told, at any number of them, and what is compared."""

import errno
from datetime import timedelta

import pytest
import torch.distributed as dist

from configs.errors import SHOWN, UserError
from configs.load import load
from trainer.data.text.token_writer import TokenFileWriter
from trainer.data.token_file import TokenFolder, folder_fingerprint
from trainer.guards import agreement
from trainer.guards.environment import ROOT, code_hashes


def compared(facts_of_rank: list[dict[str, str]]) -> tuple[str, list[str]]:
    """The message of a comparison, "" if all agree, and the collectives that it took."""
    rank, issued = dist.get_rank(), []
    original = dist.all_gather
    try:
        dist.all_gather = lambda *args, **kw: issued.append("all_gather") or original(*args, **kw)
        differing = agreement._differences(facts_of_rank[rank])
    finally:
        dist.all_gather = original
    return agreement._message("do this", differing) if differing else "", issued


@pytest.mark.slow
def test_ranks_that_agree_need_one_gather_of_a_few_bytes(ranks):
    facts = {"a": "1", "b": "2"}
    assert ranks(4, compared, [facts, dict(reversed(facts.items())), facts, facts]) == [("", ["all_gather"])] * 4


def test_each_difference_names_rank_host_key_and_both_values(ranks):
    usual = {"a": "1", "b": "2", "c": "3"}
    results = ranks(4, compared, [usual | {"a": "9"}, usual, {"a": "1", "b": "2"}, usual | {"b": "8"}])
    (message,) = {message for message, _ in results}  # all ranks say the same
    host = agreement.socket.gethostname()
    on = [f"rank {rank} ({host})" for rank in range(4)]
    assert message.split("\n") == [
        "the ranks of this launch do not agree (do this):",
        f"  a is 9 on {on[0]}, but 1 on {on[1]}, {on[2]}, {on[3]}",
        f"  b is 8 on {on[3]}, but 2 on {on[0]}, {on[1]}, {on[2]}",
        f"  c is (not set) on {on[2]}, but 3 on {on[0]}, {on[1]}, {on[3]}",
    ]


def test_the_message_is_short_at_any_number_of_ranks_and_differences():
    values = ["3e-4"] * 3000 + ["1e-3"] * 1000
    [(usual, most), (other, few)] = agreement._ranks_by_value(values)
    assert (usual, len(most), other, few[0]) == ("3e-4", 3000, "1e-3", 3000)
    names = [[f"rank {rank} (node-{rank // 8})" for rank in ranks] for ranks in (most, few)]
    differing = {f"key{i}": [(usual, names[0]), (other, names[1])] for i in range(50)}
    lines = agreement._message("do this", differing).split("\n")
    assert lines[1] == (
        "  key0 is 1e-3 on rank 3000 (node-375), rank 3001 (node-375), rank 3002 (node-375), rank 3003 (node-375) and "
        "996 more, but 3e-4 on rank 0 (node-0), rank 1 (node-0), rank 2 (node-0), rank 3 (node-0) and 2996 more"
    )
    assert len(lines) == 1 + SHOWN + 1
    assert lines[-1] == "  and 42 more"


def launched_with_another_torch() -> str:
    """The message if rank 1 has another version of torch."""
    original = agreement.torch.__version__
    agreement.torch.__version__ = "2.12.1" if dist.get_rank() == 1 else original
    try:
        agreement.compare_launches(load("debug", ("--job.device", "cpu"), 2), agreement.torch.device("cpu"))
    except UserError as error:
        return str(error)
    finally:
        agreement.torch.__version__ = original
    return ""


def test_another_torch_on_one_rank_is_named(ranks):
    said, again = ranks(2, launched_with_another_torch)
    assert said == again
    assert f"torch is 2.12.1 on rank 1 ({agreement.socket.gethostname()}), but " in said


def failing_on_rank_one(fails: bool) -> object:
    def action() -> int:
        if fails and dist.get_rank() == 1:
            raise UserError("a file has changed")
        return 10 + dist.get_rank()

    try:
        return agreement.on_all_ranks(action)
    except UserError as error:
        return str(error)


def test_an_error_of_one_rank_is_raised_on_all(ranks):
    assert ranks(2, failing_on_rank_one, False) == [[10, 11]] * 2
    assert ranks(2, failing_on_rank_one, True) == [f"rank 1 ({agreement.socket.gethostname()}): a file has changed"] * 2


def unforeseen_on_rank_one() -> str:
    def action() -> None:
        if dist.get_rank() == 1:
            raise OSError(errno.ESTALE, "Stale file handle", "a.tokens")

    try:
        agreement.on_all_ranks(action, dist.new_group(timeout=timedelta(seconds=10)))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_an_error_that_is_not_foreseen_leaves_no_rank_waiting(ranks):
    """As of a network disk that is asked whether the data have changed, or of a user's own source."""
    said = "[Errno 116] Stale file handle: 'a.tokens'"
    assert ranks(2, unforeseen_on_rank_one) == [
        f"UserError: rank 1 ({agreement.socket.gethostname()}): {said}",
        f"OSError: {said}",
    ]


def test_every_file_of_the_code_counts():
    hashes = code_hashes()
    assert {"train.py", "trainer/step.py", "parallelisms/fsdp.py", "models/llama.py", "trainer/data/order.py"} < {
        *hashes
    }
    assert all((ROOT / path).is_file() for path in hashes)


def test_the_headers_alone_give_the_fingerprint_of_a_folder(tmp_path):
    for name in ("b", "a"):
        with TokenFileWriter(tmp_path / f"{name}.tokens", 100, "ab" * 16) as writer:
            writer.append([ord(name), 1, 2])
    assert folder_fingerprint(tmp_path) == TokenFolder(tmp_path, 100).fingerprint
