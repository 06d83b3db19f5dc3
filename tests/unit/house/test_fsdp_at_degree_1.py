"""What a test changes for a while is as it was afterwards, also in a process that has imported nothing before."""

import subprocess
import sys

CONTEXT = """
from tests.fsdp_at_degree_1 import fsdp_at_degree_1
with fsdp_at_degree_1():
    import parallelisms.fsdp, trainer.planning.memory, trainer.step
    assert not parallelisms.fsdp.computes_with_copies(1, None)
from parallelisms.compute_copies import computes_with_copies
for module in (parallelisms.fsdp, trainer.planning.memory, trainer.step):
    assert module.computes_with_copies is computes_with_copies, module
"""


def test_jobs_after_the_context_have_copies_again():
    subprocess.run([sys.executable, "-c", CONTEXT], check=True)
