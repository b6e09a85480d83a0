"""What makes a target this target: fingerprints of its weights, its tokenizer and its chat template."""

import hashlib
from pathlib import Path

from dflash_lightning.cache import TargetIdentity
from dflash_lightning.target.files import TargetFiles, find_target
from dflash_lightning.target.loading import tokenizer_of

BLOCK_BYTES = 64 * 1024
BLOCKS_PER_FILE = 1024


def target_identity(name: str) -> TargetIdentity:
    """Identify a target without loading its weights.

    The three hashes depend on the files' content alone, so a target that was moved or renamed stays the same
    target; `name` and `revision` only say where it came from.

    Raises:
        TargetError: There is no such target, or it has no tokenizer.
    """
    files = find_target(name)
    tokenizer = tokenizer_of(files)
    serialized = files.folder / "tokenizer.json"
    if files.gguf is None and serialized.is_file():
        tokenizer_bytes = serialized.read_bytes()
    else:
        tokenizer_bytes = tokenizer.backend_tokenizer.to_str().encode()
    template = tokenizer.chat_template
    return TargetIdentity(
        name=files.name,
        revision=files.revision,
        weights_sha256=weights_sha256(files),
        tokenizer_sha256=hashlib.sha256(tokenizer_bytes).hexdigest(),
        chat_template_sha256=hashlib.sha256(str(template).encode()).hexdigest() if template else "",
    )


def weights_sha256(files: TargetFiles) -> str:
    """SHA-256 over the size and a sample of every weight file, in the order of their names.

    A file of up to `BLOCKS_PER_FILE` blocks (64 MiB) is read whole; of a larger one as many blocks, evenly spaced
    from its first byte to its last, so that even a target of hundreds of GB is identified in seconds.
    """
    digest = hashlib.sha256()
    for path in files.weights:
        digest.update(path.stat().st_size.to_bytes(8, "little"))
        _update(digest, path)
    return digest.hexdigest()


def _update(digest: "hashlib._Hash", path: Path) -> None:
    size = path.stat().st_size
    with path.open("rb") as file:
        if size <= BLOCKS_PER_FILE * BLOCK_BYTES:
            digest.update(file.read())
            return
        for i in range(BLOCKS_PER_FILE):
            file.seek(i * (size - BLOCK_BYTES) // (BLOCKS_PER_FILE - 1))
            digest.update(file.read(BLOCK_BYTES))
