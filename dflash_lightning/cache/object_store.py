"""A cache in an object store: S3, Google Cloud Storage, Azure or, for reading only, any HTTP server."""

import math
import os
import random
import re
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path, PurePosixPath
from typing import TypeVar

import numpy as np
import obstore
from obstore.exceptions import AlreadyExistsError, BaseError
from obstore.store import HTTPStore, from_url

from dflash_lightning.cache.byte_ranges import ObjectReader
from dflash_lightning.cache.scratch import scratch_folder
from dflash_lightning.cache.store import MARKER, CacheStore, files_below, space_needed
from dflash_lightning.errors import CacheError, ConfigError

T = TypeVar("T")

# An object travels in parts of this size: each is one request with its own timeout and retries.
PART_BYTES = 8 * 2**20
PARTS_AHEAD = 8
# What obstore says when the network failed, not the server.
BROKEN_CONNECTION = "HTTP error: "
# How it says that it tried again before it gave up.
RETRIES_MADE = re.compile(r", after (\d+) retries, max_retries: ")
LONGEST_PAUSE = 15.0
LONGEST_RETRYING = 180.0


@dataclass(frozen=True)
class ObjectStoreSettings:
    """How to reach an object store. Credentials come from where the provider's own tools find them.

    Args:
        endpoint: URL of the server, for S3-compatible stores other than Amazon's; http:// is allowed.
        region: of an S3 bucket. Default: what the AWS environment says, or us-east-1.
        anonymous: send unsigned requests, for public buckets.
        timeout: seconds without an answer, or without a byte of one, after which a request counts as failed.
        retries: how often a failed request is tried again, with growing pauses, for 3 minutes at most.
        scratch: local folder in which shards are prepared for upload. Default: the system's temporary folder.
    """

    endpoint: str | None = None
    region: str | None = None
    anonymous: bool = False
    timeout: float = 30.0
    retries: int = 10
    scratch: Path | None = None

    def __post_init__(self):
        if not 0 < self.timeout < math.inf or self.retries < 0:
            raise ConfigError(
                f"object_store.timeout is {self.timeout}, object_store.retries {self.retries}; expected a positive "
                "number of seconds and at least 0 retries."
            )


class ObjectStorage(CacheStore):
    """A cache below a URL. A folder has no rename there: its marker alone, the last object to be uploaded, commits it.

    An upload that was cut short leaves objects without a marker, which nobody reads; the next writer overwrites them.

    Raises:
        CacheError: the URL isn't one, or, in any method, the store can't be reached or refuses: with URL and object.
    """

    def __init__(self, url: str, settings: ObjectStoreSettings | None = None):
        self.location = url.rstrip("/")
        self.settings = settings or ObjectStoreSettings()
        self.concurrency = 8
        self._client = self._connect()

    def _connect(self):
        settings, options = self.settings, {}
        if settings.endpoint:
            options["endpoint"] = settings.endpoint
        if settings.region:
            options["region"] = settings.region
        if settings.anonymous:
            options["skip_signature"] = True
        seconds = timedelta(seconds=settings.timeout)
        plain_http = (settings.endpoint or self.location).startswith("http://")
        try:
            return from_url(
                self.location,
                config=options or None,
                client_options={
                    "connect_timeout": seconds,
                    "read_timeout": seconds,
                    "timeout": 10 * seconds,
                    "allow_http": plain_http,
                },
                retry_config={"max_retries": settings.retries},
            )
        except (BaseError, ValueError) as error:
            raise CacheError(f"{self.location} can't be used as an object store: {_reason(error)}") from error

    def __getstate__(self) -> dict:
        return {"location": self.location, "settings": self.settings}

    def __setstate__(self, state: dict) -> None:
        self.__init__(state["location"], state["settings"])

    def make(self) -> None:
        """Nothing to make: the bucket must exist. A plain HTTP server is refused: it can't create conditionally."""
        if isinstance(self._client, HTTPStore):
            raise CacheError(
                f"{self.location} is a plain HTTP server, for reading only; write to s3://, gs:// or az://"
            )

    def read(self, name: str) -> bytes:
        with self._naming(name):
            return bytes(obstore.get(self._client, name).bytes())

    def open_object(self, name: str) -> "RangeRequests":
        return RangeRequests(self, name)

    def read_range(self, name: str, start: int, stop: int) -> np.ndarray:
        """Bytes `start` to `stop` of an object as uint8."""
        parts = [np.frombuffer(part, dtype=np.uint8) for part in self._parts(name, start, stop)]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def replace(self, name: str, data: bytes) -> None:
        with self._naming(name):
            obstore.put(self._client, name, data)

    def create(self, name: str, data: bytes) -> bool:
        try:
            self._repeated(name, lambda: obstore.put(self._client, name, data, mode="create"))
        except AlreadyExistsError:
            # Also the answer to a repeated request whose first try had arrived.
            return self.read(name) == data
        return True

    def size(self, name: str) -> int:
        with self._naming(name):
            return obstore.head(self._client, name)["size"]

    def parts(self, name: str, size: int) -> Iterator[memoryview]:
        return self._parts(name, 0, size)

    def _parts(self, name: str, start: int, stop: int) -> Iterator[memoryview]:
        def part(first: int) -> memoryview:
            with self._naming(name):
                return memoryview(obstore.get_range(self._client, name, start=first, end=min(first + PART_BYTES, stop)))

        if stop - start <= PART_BYTES:
            yield part(start)
            return
        with ThreadPoolExecutor(PARTS_AHEAD) as pool:
            coming: deque[Future[memoryview]] = deque()
            for first in range(start, stop, PART_BYTES):
                coming.append(pool.submit(part, first))
                if len(coming) == PARTS_AHEAD:
                    yield coming.popleft().result()
            while coming:
                yield coming.popleft().result()

    def entries(self) -> list[str]:
        found = self._repeated("", lambda: obstore.list_with_delimiter(self._client))
        return sorted([*found["common_prefixes"], *(entry["path"] for entry in found["objects"])])

    def free_bytes(self) -> None:
        return None

    @contextmanager
    def prepared(self, folder: str, owner: str, needed: int) -> Iterator[Path]:
        with scratch_folder(self.settings.scratch, owner) as scratch, space_needed(scratch, needed):
            yield scratch / PurePosixPath(folder).name

    def commit(self, prepared: Path, folder: str, marker: bytes) -> None:
        files = {f"{folder}/{path.relative_to(prepared).as_posix()}": path for path in files_below(prepared)}

        def upload(name: str) -> None:
            with self._naming(name):
                obstore.put(self._client, name, files[name], chunk_size=PART_BYTES, max_concurrency=PARTS_AHEAD)

        with ThreadPoolExecutor(self.concurrency) as pool:
            list(pool.map(upload, files))
        if self._listed(folder) != {name: path.stat().st_size for name, path in files.items()}:
            raise self.contested(folder)
        if not self.create(f"{folder}/{MARKER}", marker):
            raise self.contested(folder)

    def sweep(self, folder: str) -> list[str]:
        found = sorted(self._listed(folder))
        if not found or f"{folder}/{MARKER}" in found:
            return []
        self._delete(folder, found)
        return found

    def remove(self, folder: str) -> None:
        found, marker = self._listed(folder), f"{folder}/{MARKER}"
        if found.pop(marker, None) is not None:
            self._delete(folder, [marker])
        if found:
            self._delete(folder, list(found))

    def sweep_unfinished(self, name: str) -> None:
        """Nothing to sweep: an object appears whole or not at all."""

    @contextmanager
    def _naming(self, name: str) -> Iterator[None]:
        """Make a failure of the store a CacheError with the URL and `name`."""
        _refuse_after_fork(self.location)
        try:
            yield
        except AlreadyExistsError:
            raise
        except BaseError as error:
            raise CacheError(f"{self.location}/{name}: the object store failed: {_reason(error)}") from error

    def _delete(self, folder: str, names: list[str]) -> None:
        self._repeated(folder, lambda: obstore.delete(self._client, names))

    def _listed(self, folder: str) -> dict[str, int]:
        """Size of every object below `folder`."""
        batches = self._repeated(folder, lambda: list(obstore.list(self._client, folder)))
        return {entry["path"]: entry["size"] for batch in batches for entry in batch}

    def _repeated(self, name: str, request: Callable[[], T]) -> T:
        """Do what obstore's own retries leave out: conditional writes and the bodies of listings, cut on the wire.

        The retries that obstore made count as well, and so does their time.
        """
        deadline, tries = time.monotonic() + LONGEST_RETRYING, 0
        while True:
            try:
                with self._naming(name):
                    return request()
            except CacheError as error:
                made = RETRIES_MADE.search(str(error))
                tries += 1 + (int(made[1]) if made else 0)
                broken = BROKEN_CONNECTION in str(error)
                if not broken or tries > self.settings.retries or time.monotonic() > deadline:
                    raise
            time.sleep(random.uniform(0.5, 1) * min(0.1 * 2 ** (tries - 1), LONGEST_PAUSE))


def _reason(error: Exception) -> str:
    """What obstore says, without the same once more as Rust prints it."""
    return " ".join(str(error).split("\n\nDebug source:")[0].split())


# The process in which obstore's threads run. A fork has the module, but not the threads: each call would wait for ever.
_process: int | None = None


def _refuse_after_fork(location: str) -> None:
    global _process
    _process = _process or os.getpid()
    if _process != os.getpid():
        raise CacheError(
            f"{location}: this process was forked from one that had used an object store, which can't work. Start "
            "worker processes by forkserver or spawn."
        )


class RangeRequests(ObjectReader):
    """An object of which each range is requested anew."""

    def __init__(self, storage: ObjectStorage, name: str):
        self._storage, self._name = storage, name
        self.size = storage.size(name)

    def read(self, start: int, stop: int) -> np.ndarray:
        return self._storage.read_range(self._name, start, stop)
