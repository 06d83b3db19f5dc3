"""A checkpoint of many ranks for torch's own tools: a folder of links to its files, with DCP's index of them.

The folder is a new one, because a committed checkpoint never changes.
"""

from dataclasses import replace
from pathlib import Path

from checkpoint.export.output import finish, unfinished_folder, write_bytes
from checkpoint.index import METADATA_NAME, read_metadata, text_for_torch
from checkpoint.lock import ReadLock
from checkpoint.manifest import read_manifest


def write_torch_index(checkpoint: Path, output: Path) -> int:
    """Make a folder that `dcp.load` and `dcp_to_torch_save` open, and return the number of parts of tensors.

    It takes the memory of the whole index: about 1 kB for each part.

    Args:
        checkpoint: folder of the checkpoint, whose files are linked.
        output: folder to create.

    Raises:
        UserError: the checkpoint is damaged, or the output exists or can't be written.
    """
    with ReadLock(checkpoint):
        read_manifest(checkpoint)
        metadata = read_metadata(checkpoint)
        assert metadata.storage_data is not None  # Keel's index always has it
        places = dict(metadata.storage_data.items())
        with unfinished_folder(output) as folder:
            for name in sorted({place.relative_path for place in places.values()}):
                (folder / name).symlink_to((checkpoint / name).absolute())
            write_bytes(folder / METADATA_NAME, text_for_torch(replace(metadata, storage_data=places)))
            finish(folder, output)
    return len(places)
