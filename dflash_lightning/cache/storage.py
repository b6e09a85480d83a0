"""How the features of a cache are stored: the number of bits of a value, and the lossless compression on top."""

from typing import Literal, get_args

Storage = Literal["bfloat16", "8bit", "4bit", "2bit", "1bit"]
Compression = Literal["none", "lz4", "zstd"]
STORAGES: tuple[Storage, ...] = get_args(Storage)
COMPRESSIONS: tuple[Compression, ...] = get_args(Compression)


def packed_bits(storage: Storage) -> int | None:
    """Bits of a packed value; None for bfloat16, which is stored as it is."""
    return None if storage == "bfloat16" else int(storage.removesuffix("bit"))


def default_compression(storage: Storage) -> Compression:
    """lz4 finds the exponents of bfloat16; packed rows hold next to nothing to find, and are read faster without.

    zstd finds whole tokens that samples share, such as those of a long system prompt.
    """
    return "lz4" if storage == "bfloat16" else "none"
