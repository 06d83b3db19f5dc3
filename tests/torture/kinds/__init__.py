"""The kinds of files that Keel reads, for `fuzz.py`."""

from tests.torture.kinds import checkpoints, data, hugging_face, jobs, run_folder, tokenizers
from tests.torture.kinds.kind import Kind

KINDS: dict[str, Kind] = {
    kind.name: kind for kinds in (jobs, checkpoints, hugging_face, tokenizers, data, run_folder) for kind in kinds.KINDS
}
