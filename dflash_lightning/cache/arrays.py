"""The Zarr arrays of one shard: names, types, chunks and codecs. The only module that reads or writes one."""

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import zarr
import zarr.abc.store
from zarr.codecs import BloscCodec, Crc32cCodec

FEATURES = "features"
FEATURE_CHUNK_ROWS = 128
# Zarr returns fill values for a missing object and for an empty one, without a word. None of these can be a stored
# value (0xFFFF is a bfloat16 NaN, 255 is never in UTF-8), so a reader can tell.
FILL_VALUES = {
    FEATURES: np.uint16(0xFFFF),
    "input_ids": np.int32(-1),
    "loss_mask": np.uint8(255),
    "offsets": np.int64(-1),
    "sample_ids": np.uint8(255),
    "sample_id_offsets": np.int64(-1),
    "anchor_candidates": np.int32(-1),
}
METADATA = "zarr.json"
# zarr takes cpu + 4 threads (32 at most) in every process: too many for several data workers in each of several ranks.
MAX_THREADS = 4


def data_object(name: str) -> str:
    """Path, within a shard, of the one object that holds the values of array `name`."""
    return f"{name}/c/0/0" if name == FEATURES else f"{name}/c/0"


def metadata_object(name: str) -> str:
    """Path, within a shard, of the metadata of array `name`."""
    return f"{name}/{METADATA}"


def objects_of(arrays: Iterable[str]) -> frozenset[str]:
    """The objects of a shard that holds `arrays`, its marker left out."""
    names = list(arrays)
    return frozenset({METADATA, *map(metadata_object, names), *map(data_object, names)})


def write_arrays(
    folder: Path, columns: dict[str, np.ndarray], group_attributes: dict, feature_attributes: dict
) -> None:
    """Create the Zarr group `folder` and write every array with its final shape in one go.

    The bytes depend on the values alone: Blosc runs single-threaded inside zarr's own threads. Every array is one
    object; the features' holds inner chunks of 128 rows. A CRC-32C closes each chunk, since Zarr doesn't check chunk
    data by itself.

    Args:
        folder: where to create the group; must not exist.
        columns: an array for each name of FILL_VALUES, in the dtype given there, none of them empty; or no array at
            all, for a shard without a sample.
    """
    limit_threads()
    group = zarr.create_group(folder, zarr_format=3, attributes=group_attributes)
    for name, values in columns.items():
        fill_value = FILL_VALUES[name]
        assert values.dtype == fill_value.dtype, name
        is_features = name == FEATURES
        chunk = (FEATURE_CHUNK_ROWS, values.shape[1]) if is_features else values.shape
        whole = (-(-len(values) // FEATURE_CHUNK_ROWS) * FEATURE_CHUNK_ROWS, values.shape[1]) if is_features else None
        array = group.create_array(
            name,
            shape=values.shape,
            dtype=values.dtype,
            chunks=chunk,
            shards=whole,
            compressors=(
                BloscCodec(
                    typesize=values.itemsize,
                    cname="lz4",
                    clevel=5,
                    shuffle="bitshuffle" if is_features else "shuffle",
                ),
                Crc32cCodec(),
            ),
            fill_value=fill_value,
            attributes=feature_attributes if is_features else {},
            config={"write_empty_chunks": True},
        )
        array[...] = values


def open_array(store: zarr.abc.store.Store, shard: str, name: str) -> zarr.Array:
    """Open array `name` of the group `shard` for reading. Values are read, and their CRC checked, on access."""
    limit_threads()
    return zarr.open_array(store, path=f"{shard}/{name}", mode="r", zarr_format=3)


def limit_threads() -> None:
    """Give zarr a small thread pool in this process, unless the user configured one (ZARR_THREADING__MAX_WORKERS)."""
    if zarr.config.get("threading.max_workers") is None:
        zarr.config.set({"threading.max_workers": MAX_THREADS})
