"""The manifest: the target, layers, data and generation that a cache belongs to, and how its samples form shards."""

import hashlib
import json
from dataclasses import asdict, dataclass
from functools import cached_property

from dflash_lightning.cache.records import dump_record, parse_record
from dflash_lightning.cache.storage import COMPRESSIONS, STORAGES, Compression, Storage
from dflash_lightning.cache.store import CacheStore
from dflash_lightning.errors import CacheError

MANIFEST = "manifest.json"
# The same bytes once more: without a manifest a cache could neither be read nor repaired.
MANIFEST_COPY = "manifest.copy.json"
FORMAT_VERSION = 2
LAYER_CONVENTION = "0-based decoder layer outputs: layer i is hidden_states[i + 1] of transformers"
NOT_SET = "nothing"
PROVENANCE = ("target.name", "target.revision", "source", "code_version")


@dataclass(frozen=True)
class TargetIdentity:
    """What makes a target the same target: weights, tokenizer and chat template. Name and revision are for people."""

    name: str
    revision: str
    weights_sha256: str
    tokenizer_sha256: str
    chat_template_sha256: str

    def fits(self, other: "TargetIdentity") -> bool:
        """Whether both are one model, whatever folder or name it was loaded from."""
        return (self.weights_sha256, self.tokenizer_sha256, self.chat_template_sha256) == (
            other.weights_sha256,
            other.tokenizer_sha256,
            other.chat_template_sha256,
        )


@dataclass(frozen=True, kw_only=True)
class CacheManifest:
    """Identity, schema and plan of a cache, fixed before the first sample is written.

    Attributes:
        target: the model whose hidden states are stored.
        target_layer_ids: tapped decoder layers, K of them, 0-based, in the order of concatenation
            (see `layer_convention`).
        hidden_size: H; a feature row has K * H values.
        storage: how a feature is stored: as it is, or packed into so many bits (`packing`).
        compression: what the features are compressed with, without loss.
        generation: how the answers were made (mode, thinking, max_new_tokens, ...); any JSON object.
        capture: the settings of the forward that the features' bits depend on (dtype, device, batch_tokens, ...); any
            JSON object.
        dataset_sha256: fingerprint of the data set that the samples are from.
        max_length: tokens of the longest planned sample.
        source: where the target and the data were (`target`, `data`). For people and for `cache verify --repair`.
        code_version: version of the code that planned the cache. For people: what a version can read and continue is
            told by `format_version`.
        shard_samples: number of samples in each planned shard. It follows from the data set alone, never from the
            number of writers, so that every run plans the same files.

    Raises:
        CacheError: no sample is planned, or a field has a value that this version can't read or write.
    """

    format_version: int = FORMAT_VERSION
    target: TargetIdentity
    target_layer_ids: tuple[int, ...]
    layer_convention: str = LAYER_CONVENTION
    hidden_size: int
    storage: Storage
    compression: Compression
    generation: dict
    capture: dict
    dataset_sha256: str
    max_length: int
    source: dict
    code_version: str
    shard_samples: tuple[int, ...]

    def __post_init__(self):
        object.__setattr__(self, "target_layer_ids", tuple(self.target_layer_ids))
        object.__setattr__(self, "shard_samples", tuple(self.shard_samples))
        for field in ("generation", "capture", "source"):
            object.__setattr__(self, field, json.loads(json.dumps(getattr(self, field))))
        if self.format_version != FORMAT_VERSION:
            raise CacheError(f"the cache has format version {self.format_version}; this version reads {FORMAT_VERSION}")
        for field, known in (
            ("layer_convention", (LAYER_CONVENTION,)),
            ("storage", STORAGES),
            ("compression", COMPRESSIONS),
        ):
            if getattr(self, field) not in known:
                raise CacheError(
                    f"{field} is {getattr(self, field)!r}; this version reads {', '.join(map(repr, known))}"
                )
        if not self.target_layer_ids or self.hidden_size < 1:
            raise CacheError(
                f"a cache needs at least one layer and a positive hidden size; target_layer_ids is "
                f"{list(self.target_layer_ids)}, hidden_size {self.hidden_size}"
            )
        if not self.shard_samples or min(self.shard_samples) < 1:
            raise CacheError(
                f"a cache needs at least one sample, and no empty shard; planned: {_show('shard_samples', self)}"
            )

    @property
    def feature_width(self) -> int:
        """Values in one feature row: K * H."""
        return len(self.target_layer_ids) * self.hidden_size

    @property
    def num_shards(self) -> int:
        return len(self.shard_samples)

    @property
    def num_samples(self) -> int:
        """Planned samples."""
        return sum(self.shard_samples)

    @cached_property
    def identity_sha256(self) -> str:
        """SHA-256 (hex) of all fields but those that only say where things came from. Two caches that a run may
        continue have the same one; each shard's marker repeats it.
        """
        identity = {field: value for field, value in _flat(self).items() if field not in PROVENANCE}
        return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()

    def create(self, store: CacheStore) -> bool:
        """Write `manifest.json` into the cache unless there is one; of several processes exactly one succeeds.

        Returns:
            Whether this call wrote it. After either answer a whole manifest is there.
        """
        return store.create(MANIFEST, self.dump())

    def dump(self) -> bytes:
        """The content of `manifest.json`, and of its copy."""
        return dump_record(asdict(self))

    @staticmethod
    def exists(store: CacheStore) -> bool:
        """Whether a cache was begun here."""
        try:
            store.size(MANIFEST)
        except FileNotFoundError:
            return False
        return True

    @classmethod
    def load(cls, store: CacheStore, name: str = MANIFEST) -> "CacheManifest":
        """Read the manifest of a cache, or its copy.

        Raises:
            CacheError: there is none, it is damaged, or another format version wrote it.
        """
        file = f"{store.location}/{name}"
        try:
            data = store.read(name)
        except FileNotFoundError as error:
            raise CacheError(
                f"{store.location} is not a feature cache, or not yet: it has no {name}. `capture` makes one."
            ) from error
        try:
            fields = parse_record(data)
            # The version decides the fields, so it is judged before them.
            if fields.get("format_version") == FORMAT_VERSION:
                fields["target"] = TargetIdentity(**fields["target"])
                return cls(**fields)
        except (CacheError, TypeError, KeyError) as error:
            raise CacheError(
                f"{file} is damaged: {error}. `dflash-lightning cache verify {store.location} --repair` restores it"
            ) from error
        found = fields.get("format_version")
        raise CacheError(f"{file} has format version {found}; this version reads {FORMAT_VERSION}")

    def differences(self, other: "CacheManifest") -> list[str]:
        """Each field in which the cache (self) and a run (other) differ: "field: cache has X, this run has Y".

        Fields that only say where things came from are free: `source`, `code_version`, and the target's name and
        revision as long as its hashes are the same.
        """
        free = set(PROVENANCE)
        if not self.target.fits(other.target):
            free -= {"target.name", "target.revision"}
        mine, theirs = _flat(self), _flat(other)
        return [
            f"{field}: cache has {_show(field, self)}, this run has {_show(field, other)}"
            for field in {**mine, **theirs}
            if field not in free and mine.get(field, NOT_SET) != theirs.get(field, NOT_SET)
        ]


def _flat(manifest: CacheManifest) -> dict:
    """All fields, those of the target, `generation` and `capture` as "target.name", "capture.dtype" and so on."""
    flat = {}
    for field, value in asdict(manifest).items():
        nested = isinstance(value, dict) and field != "source"
        flat |= {f"{field}.{key}": inner for key, inner in value.items()} if nested else {field: value}
    return flat


def _show(field: str, manifest: CacheManifest) -> str:
    if field == "shard_samples":
        sizes = manifest.shard_samples
        shown = ", ".join(map(str, sizes[:8])) + (", ..." if len(sizes) > 8 else "")
        return f"{sum(sizes)} samples in {len(sizes)} shards ({shown})"
    value = _flat(manifest).get(field, NOT_SET)
    return str(list(value)) if isinstance(value, tuple) else str(value)
