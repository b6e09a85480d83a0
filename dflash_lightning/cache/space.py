"""Whether a cache fits where it is to lie."""

from dflash_lightning.cache.manifest import CacheManifest
from dflash_lightning.cache.packing import packed_width
from dflash_lightning.cache.storage import Storage, packed_bits
from dflash_lightning.cache.store import CacheStore
from dflash_lightning.errors import CacheError

# What lossless compression leaves at the very least: lz4 finds the exponents, zstd also tokens that samples share.
LEAST_LEFT = {"none": 1.0, "lz4": 0.5, "zstd": 0.2}


def feature_row_bytes(storage: Storage, width: int) -> int:
    """Bytes of the features of one token, ``width`` values, before lossless compression."""
    bits = packed_bits(storage)
    return 2 * width if bits is None else packed_width(width, bits)


def check_space(store: CacheStore, manifest: CacheManifest, tokens: int) -> None:
    """Refuse to begin what can't be finished.

    Args:
        store: where the cache lies.
        manifest: of the cache.
        tokens: tokens that are still to be written, by all writers together.

    Raises:
        CacheError: even well compressed, they need more than the free space.
    """
    free = store.free_bytes()
    row_bytes = feature_row_bytes(manifest.storage, manifest.feature_width)
    needed = int(tokens * row_bytes * LEAST_LEFT[manifest.compression])
    if free is not None and needed > free:
        raise CacheError(
            f"{store.location}: {tokens:,} tokens need {needed:,} bytes at the very least, and {free:,} bytes are "
            "free. Free some space, name a larger disk, or store fewer bits; `dflash-lightning cache plan` shows what "
            "each storage needs."
        )
