"""From what a user typed, a path or a URL, to the store behind it."""

from pathlib import Path
from urllib.parse import unquote, urlsplit

from dflash_lightning.cache.object_store import ObjectStorage, ObjectStoreSettings
from dflash_lightning.cache.store import CacheStore, LocalFolder
from dflash_lightning.errors import CacheError


def open_store(cache: str | Path | CacheStore, settings: ObjectStoreSettings | None = None) -> CacheStore:
    """The store at a path or URL; a store is returned as it is.

    Args:
        cache: a path, or a URL with s3://, gs://, az://, abfs://, http(s):// or file://.
        settings: how to reach an object store; without meaning for a path.

    Raises:
        CacheError: the path is empty, or the URL can't be used.
    """
    if isinstance(cache, CacheStore):
        return cache
    if cache == "":
        raise CacheError("the path of the cache is empty; give a folder or a URL")
    if isinstance(cache, Path) or "://" not in cache:
        return LocalFolder(cache)
    parts = urlsplit(cache)
    if parts.scheme == "file":
        if parts.netloc not in ("", "localhost") or not parts.path or parts.query or parts.fragment:
            raise CacheError(
                f"{cache} can't be used: expected file:///absolute/path of this machine, with %23 for # and %3F for ?"
            )
        return LocalFolder(unquote(parts.path))
    if parts.scheme == "memory":
        raise CacheError(f"{cache} can't be used: it would be gone with this process")
    return ObjectStorage(cache, settings)
