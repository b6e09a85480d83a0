"""Writing a shard in the background, so that the next one can be computed meanwhile."""

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType

from dflash_lightning.cache.samples import Quarantined, Sample
from dflash_lightning.cache.shards import ShardMarker
from dflash_lightning.cache.writer import CacheWriter


class BackgroundWriter:
    """Hands shards to a thread that compresses, syncs and commits them, one at a time and in the order given.

    Memory is bounded: `write_shard` waits until the shard before is committed, so that besides the shard that the
    caller fills there is never more than one. Compression, checksums and disk run without the interpreter lock.

    A write that failed raises its own error, in the caller, from the next method that is called here. Leaving the
    block waits for the last shard; after an error in the block as well, so that no half-written shard is left.

    Usage::

        with BackgroundWriter(writer) as background:
            for shard in shards:
                for batch in batches(shard):
                    ...
                    background.check()
                background.write_shard(shard, samples)
    """

    def __init__(self, writer: CacheWriter):
        self._writer = writer
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="shard-writer")
        self._writing: Future[ShardMarker] | None = None

    def __enter__(self) -> "BackgroundWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._thread.shutdown()
        if kind is None:
            self._wait()

    def write_shard(self, shard: int, samples: Sequence[Sample | Quarantined]) -> None:
        """Start writing a shard, once the one before is committed.

        Raises:
            CacheError: the shard before couldn't be written; see `CacheWriter.write_shard`.
        """
        self._wait()
        self._writing = self._thread.submit(self._writer.write_shard, shard, samples)

    def check(self) -> None:
        """Raise the error of a write that has failed already; never waits."""
        if self._writing is not None and self._writing.done():
            self._wait()

    def _wait(self) -> None:
        if self._writing is not None:
            writing, self._writing = self._writing, None
            writing.result()
