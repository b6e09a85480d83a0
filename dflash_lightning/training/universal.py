"""A checkpoint of DeepSpeed for another number of ranks: the state of each parameter whole, cut anew when read.

The conversion is DeepSpeed's, by its "universal checkpoint".
"""

import argparse
import contextlib
import io
import shutil
from pathlib import Path

from dflash_lightning.checkpoints import SHARDS, UNREADABLE
from dflash_lightning.errors import CheckpointError

SUFFIX = ".universal"


def write_universal(checkpoint: Path, universal: Path) -> None:
    """Convert a checkpoint of any number of ranks into a folder that any number of ranks can load.

    It takes about the space of the checkpoint, and twice that while it is written. Whatever lies there is replaced.

    Raises:
        CheckpointError: the optimizer isn't of a kind that DeepSpeed converts (Adam is), or there is no room.
    """
    # Here, because DeepSpeed takes seconds to import.
    from deepspeed.checkpoint import ds_to_universal

    shutil.rmtree(universal, ignore_errors=True)
    options = argparse.Namespace(
        input_folder=str(checkpoint / SHARDS),
        output_folder=str(universal / SHARDS),
        # In this process: a fork of one that holds a GPU or a process group is asking for trouble.
        num_extract_workers=1,
        num_merge_workers=1,
        keep_temp_folder=False,
        strict=True,
        inject_missing_state=True,
    )
    chatter = io.StringIO()
    try:
        with contextlib.redirect_stdout(chatter), contextlib.redirect_stderr(chatter):
            ds_to_universal.main(options)
    except UNREADABLE as error:
        shutil.rmtree(universal, ignore_errors=True)
        raise CheckpointError(
            f"{checkpoint} can't be converted for another number of ranks ({type(error).__name__}: {error}). Resume on "
            "as many ranks as it was written by; if that works, mind the free space and the optimizer: DeepSpeed "
            "converts Adam's state only."
        ) from error
