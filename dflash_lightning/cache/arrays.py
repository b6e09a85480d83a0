"""The Zarr arrays of one shard: names, types, chunks and codecs. The only module that calls zarr."""

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import zarr
from zarr.codecs import BloscCodec, Crc32cCodec, ZstdCodec

from dflash_lightning.cache.storage import Compression, Storage, packed_bits

FEATURES = "features"
CHANNELS = "channels"
# A chunk of features is the least that is read and the most that is compressed at once. To read a sample of some
# hundred tokens, few rows of others should have to be decoded: a chunk is small. lz4 finds what it finds within a row.
LZ4_CHUNK_ROWS = 32
CHUNK_BYTES = 1 << 18
# Zarr returns fill values for a missing object and for an empty one, without a word. None of these can be the last
# stored value (0xFFFF is a bfloat16 NaN, 255 is never in UTF-8, a packed row ends with a scale), so a reader can tell.
_FILL_VALUES = {
    "input_ids": np.int32(-1),
    "loss_mask": np.uint8(255),
    "offsets": np.int64(-1),
    "sample_ids": np.uint8(255),
    "sample_id_offsets": np.int64(-1),
    "anchor_candidates": np.int32(-1),
}
_PLAIN = {FEATURES: np.uint16(0xFFFF)}
_PACKED = {FEATURES: np.uint8(0), CHANNELS: np.float32("nan")}
METADATA = "zarr.json"
_LZ4 = {"cname": "lz4", "clevel": 5, "shuffle": "shuffle"}
_FEATURE_CODECS: dict[Compression, tuple] = {
    "none": (),
    "lz4": (BloscCodec(typesize=2, **{**_LZ4, "shuffle": "bitshuffle"}),),
    "zstd": (ZstdCodec(level=1),),
}
# zarr takes cpu + 4 threads (32 at most) in every process: too many for several data workers in each of several ranks.
MAX_THREADS = 4


def data_object(name: str) -> str:
    """Path, within a shard, of the one object that holds the values of array `name`."""
    return f"{name}/c/0/0" if name in (FEATURES, CHANNELS) else f"{name}/c/0"


def metadata_object(name: str) -> str:
    """Path, within a shard, of the metadata of array `name`."""
    return f"{name}/{METADATA}"


def fill_values(storage: Storage) -> dict[str, np.generic]:
    """Name and fill value (and so the dtype) of each array of a shard with samples."""
    return {**(_PLAIN if packed_bits(storage) is None else _PACKED), **_FILL_VALUES}


def objects_of(arrays: Iterable[str]) -> frozenset[str]:
    """The objects of a shard that holds `arrays`, its marker left out."""
    names = list(arrays)
    return frozenset({METADATA, *map(metadata_object, names), *map(data_object, names)})


def write_arrays(
    folder: Path,
    columns: dict[str, np.ndarray],
    *,
    storage: Storage,
    compression: Compression,
    group_attributes: dict,
    feature_attributes: dict,
) -> None:
    """Create the Zarr group `folder` and write every array with its final shape in one go.

    The bytes depend on the values alone: Blosc runs single-threaded inside zarr's own threads. Every array is one
    object; the features' holds inner chunks of `chunk_rows` rows. A CRC-32C closes each chunk, since Zarr doesn't check
    chunk data by itself.

    Args:
        folder: where to create the group; must not exist.
        columns: an array for each name of `fill_values`, in the dtype given there, none of them empty; or no array at
            all, for a shard without a sample.
        storage: of the features.
        compression: of the features.
    """
    limit_threads()
    group = zarr.create_group(folder, zarr_format=3, attributes=group_attributes)
    expected = fill_values(storage)
    for name, values in columns.items():
        fill_value = expected[name]
        assert values.dtype == fill_value.dtype, name
        is_features = name == FEATURES
        chunk = (chunk_rows(values, compression), values.shape[1]) if is_features else values.shape
        whole = (-(-len(values) // chunk[0]) * chunk[0], values.shape[1]) if is_features else None
        lossless = _FEATURE_CODECS[compression] if is_features else (BloscCodec(typesize=values.itemsize, **_LZ4),)
        array = group.create_array(
            name,
            shape=values.shape,
            dtype=values.dtype,
            chunks=chunk,
            shards=whole,
            compressors=(*lossless, Crc32cCodec()),
            fill_value=fill_value,
            attributes=feature_attributes if is_features else {},
            config={"write_empty_chunks": True},
        )
        array[...] = values


def chunk_rows(features: np.ndarray, compression: Compression) -> int:
    """Rows of a chunk: the rows are cut evenly, as the last chunk is stored as large as the others."""
    most = LZ4_CHUNK_ROWS if compression == "lz4" else max(1, CHUNK_BYTES // features[0].nbytes)
    chunks = -(-len(features) // most)
    return -(-len(features) // chunks)


def limit_threads() -> None:
    """Give zarr a small thread pool in this process, unless the user configured one (ZARR_THREADING__MAX_WORKERS)."""
    if zarr.config.get("threading.max_workers") is None:
        zarr.config.set({"threading.max_workers": MAX_THREADS})
