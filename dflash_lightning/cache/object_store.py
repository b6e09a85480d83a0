"""A cache in an object store: S3, Google Cloud Storage, Azure or, for reading only, any HTTP server."""

import hashlib
import os
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import obstore
import zarr.storage
from obstore.exceptions import AlreadyExistsError, BaseError
from obstore.store import from_url

from dflash_lightning.cache.store import MARKER, CacheStore, space_needed
from dflash_lightning.errors import CacheError, ConfigError

# An object is downloaded in parts of this size: each is one request with its own timeout and retries.
PART_BYTES = 16 * 2**20
# Requests of one process at a time.
CONCURRENCY = 8


@dataclass(frozen=True)
class ObjectStoreSettings:
    """How to reach an object store. Credentials come from where the provider's own tools find them.

    Args:
        endpoint: URL of the server, for S3-compatible stores other than Amazon's; http:// is allowed.
        region: of an S3 bucket. Default: what the AWS environment says, or us-east-1.
        anonymous: send unsigned requests, for public buckets.
        timeout: seconds without an answer, or without a byte of one, after which a request counts as failed.
        retries: how often a failed request is tried again, with growing pauses.
        scratch: local folder in which shards are prepared for upload. Default: the system's temporary folder.
    """

    endpoint: str | None = None
    region: str | None = None
    anonymous: bool = False
    timeout: float = 30.0
    retries: int = 10
    scratch: Path | None = None

    def __post_init__(self):
        if self.timeout <= 0 or self.retries < 0:
            raise ConfigError(
                f"object_store.timeout is {self.timeout}, object_store.retries {self.retries}; expected more than 0 "
                "seconds and at least 0 retries."
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
            raise CacheError(f"{self.location} can't be used as an object store: {error}") from error

    def __getstate__(self) -> dict:
        return {"location": self.location, "settings": self.settings}

    def __setstate__(self, state: dict) -> None:
        self.__init__(state["location"], state["settings"])

    def make(self) -> None:
        """Nothing to make: the bucket must exist."""

    def read(self, name: str) -> bytes:
        with self._named(name):
            return bytes(obstore.get(self._client, name).bytes())

    def replace(self, name: str, data: bytes) -> None:
        with self._named(name):
            obstore.put(self._client, name, data)

    def create(self, name: str, data: bytes) -> bool:
        try:
            with self._named(name):
                obstore.put(self._client, name, data, mode="create")
        except AlreadyExistsError:
            # Also the answer to a repeated request whose first try had arrived.
            return self.read(name) == data
        return True

    def size(self, name: str) -> int:
        with self._named(name):
            return obstore.head(self._client, name)["size"]

    def sha256(self, name: str) -> str:
        digest = hashlib.sha256()
        for part in self.parts(name, self.size(name)):
            digest.update(part)
        return digest.hexdigest()

    def parts(self, name: str, size: int) -> Iterator[memoryview]:
        """The content of an object of `size` bytes, piece by piece; each piece is one request with its own retries."""
        for start in range(0, size, PART_BYTES):
            with self._named(name):
                part = obstore.get_range(self._client, name, start=start, end=min(start + PART_BYTES, size))
            yield memoryview(part)

    def entries(self) -> list[str]:
        with self._named(""):
            found = obstore.list_with_delimiter(self._client)
        return sorted([*found["common_prefixes"], *(entry["path"] for entry in found["objects"])])

    def free_bytes(self) -> None:
        return None

    @contextmanager
    def prepared(self, folder: str, owner: str, needed: int) -> Iterator[Path]:
        with (
            space_needed(self.settings.scratch or Path(tempfile.gettempdir()), needed),
            tempfile.TemporaryDirectory(
                prefix="dflash-", suffix=f"-{owner}", dir=self.settings.scratch, ignore_cleanup_errors=True
            ) as scratch,
        ):
            yield Path(scratch, os.path.basename(folder))

    def commit(self, prepared: Path, folder: str, marker: bytes) -> None:
        files = {path.relative_to(prepared).as_posix(): path for path in sorted(prepared.rglob("*")) if path.is_file()}

        def upload(name: str) -> None:
            with self._named(f"{folder}/{name}"):
                obstore.put(self._client, f"{folder}/{name}", files[name], max_concurrency=CONCURRENCY)

        with ThreadPoolExecutor(CONCURRENCY) as pool:
            list(pool.map(upload, files))
        expected = {f"{folder}/{name}": path.stat().st_size for name, path in files.items()}
        if self._listed(folder) != expected or not self.create(f"{folder}/{MARKER}", marker):
            raise self.contested(folder)

    def sweep(self, folder: str) -> list[str]:
        found = sorted(self._listed(folder))
        if not found or f"{folder}/{MARKER}" in found:
            return []
        with self._named(folder):
            obstore.delete(self._client, found)
        return found

    def remove(self, folder: str) -> None:
        found = self._listed(folder)
        marker = f"{folder}/{MARKER}"
        with self._named(folder):
            if found.pop(marker, None) is not None:
                obstore.delete(self._client, marker)
            if found:
                obstore.delete(self._client, list(found))

    def sweep_unfinished(self, name: str) -> None:
        """Nothing to sweep: an object appears whole or not at all."""

    def zarr_store(self) -> zarr.storage.ObjectStore:
        return zarr.storage.ObjectStore(self._client, read_only=True)

    def _listed(self, folder: str) -> dict[str, int]:
        """Size of every object below `folder`."""
        with self._named(folder):
            return {entry["path"]: entry["size"] for batch in obstore.list(self._client, folder) for entry in batch}

    @contextmanager
    def _named(self, name: str) -> Iterator[None]:
        """Make a refusal or failure of the store a CacheError with URL and object.

        "Not found" (FileNotFoundError) and "exists already" (AlreadyExistsError) stay what they are.
        """
        try:
            yield
        except AlreadyExistsError:
            raise
        except BaseError as error:
            raise self.unreachable(name, error) from error

    def unreachable(self, name: str, error: Exception) -> CacheError:
        """The error for an object that the store doesn't give or take."""
        reason = str(error).split("\n\nDebug source:")[0].strip()
        return CacheError(f"{self.location}/{name}: the object store failed ({type(error).__name__}: {reason})")
