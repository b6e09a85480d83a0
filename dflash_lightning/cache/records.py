"""Small JSON records that carry their own checksum: the manifest and the commit markers."""

import hashlib
import json

from dflash_lightning.errors import CacheError


def dump_record(payload: dict) -> bytes:
    """Serialise `payload` as readable JSON that carries its own SHA-256, so that a flipped byte can't pass.

    The digest (key `sha256`, last) is taken over the same JSON without that key. One payload has one serialisation.
    """
    digest = hashlib.sha256(json.dumps(payload, indent=2).encode()).hexdigest()
    return json.dumps({**payload, "sha256": digest}, indent=2).encode()


def parse_record(data: bytes) -> dict:
    """Return the payload of `dump_record`; CacheError says what is wrong if a single byte differs."""
    try:
        payload = json.loads(data)
    except ValueError as error:
        raise CacheError(f"not valid JSON ({error})") from error
    if not isinstance(payload, dict) or "sha256" not in payload:
        raise CacheError("no checksum in it")
    del payload["sha256"]
    if dump_record(payload) != data:
        raise CacheError("its checksum doesn't match its content")
    return payload
