"""Checks of the parts of a run, and of whether they fit each other: target, data, cache and training configuration."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.filesize import decimal

from dflash_lightning.cache import FeatureCache
from dflash_lightning.decoding.decode import plain_decode
from dflash_lightning.devices import resolve_device
from dflash_lightning.doctor.verdict import Verdict
from dflash_lightning.errors import ConfigError, DataError, DFlashError, TargetError
from dflash_lightning.prepare.data import DataInfo, load_data
from dflash_lightning.prompts.rows import PromptRow, prompt_token_ids
from dflash_lightning.target import (
    load_generation_config,
    load_target,
    load_tokenizer,
    resolve_mask_token_id,
    stop_token_ids,
    target_identity,
    target_text_config,
)
from dflash_lightning.wording import counted
from dflash_lightning.writable import advised

NEW_TOKENS = 16


def told(subject: str, check: Callable[..., Verdict], *arguments: Any) -> Verdict:
    """The verdict of a check; a user's mistake is one, and its message says what to do."""
    try:
        return check(*arguments)
    except DFlashError as error:
        return Verdict(subject, "fails", str(error))
    except OSError as error:
        if (message := advised(error)) is None:
            raise
        return Verdict(subject, "fails", message)
    except torch.OutOfMemoryError as error:
        return Verdict(
            subject,
            "fails",
            str(error).splitlines()[0],
            "Spread the target (`target_on: device_map` of DecodedAcceptance, `--device-map auto` of capture).",
        )


@dataclass(frozen=True)
class Parts:
    """What a run is made of, as far as it is given.

    Attributes:
        target: folder, hub name or .gguf file.
        data: folder that `prepare` wrote.
        cache: folder or URL of a feature cache.
        training: YAML file of a training.
    """

    target: str | None = None
    data: Path | None = None
    cache: str | None = None
    training: Path | None = None

    def check(self) -> Iterator[Verdict]:
        """Each given part by itself, then whether they fit each other."""
        if self.target is not None:
            yield told("target", self._target)
            if self.training is None:  # which may name one
                yield self._mask_token()
        if self.data is not None:
            yield told("data", self._data)
        if self.cache is not None:
            yield told("cache", self._cache)
        if self.training is not None:
            # Lightning and DeepSpeed take seconds to import.
            from dflash_lightning.doctor.training import check_training

            yield from check_training(self.training)

    def _target(self) -> Verdict:
        """Load it and let it answer."""
        device = resolve_device("auto")
        tokenizer, start = load_tokenizer(self.target), time.perf_counter()
        model = load_target(self.target, dtype=torch.bfloat16, device=device)
        loaded = time.perf_counter()
        turn = [{"role": "user", "content": "Count from 1 to 5."}]
        row = PromptRow("doctor", turn, bare=True, response=None, finish_reason="stop")
        token_ids = prompt_token_ids(row, tokenizer, None)
        text = plain_decode(model, token_ids, max_new_tokens=NEW_TOKENS, stop_ids=stop_token_ids(model, tokenizer))
        answer = tokenizer.decode(text.token_ids, skip_special_tokens=True).strip()
        seconds = time.perf_counter() - loaded
        return Verdict(
            "target",
            "ok",
            f"{self.target} was loaded in {loaded - start:.1f} s and, asked to count from 1 to 5, said {answer!r} in "
            f"{seconds:.1f} s ({device}, bfloat16)",
        )

    def _mask_token(self) -> Verdict:
        """Which token a drafter for this target takes for its empty slots, unless it is told another one."""
        try:
            tokenizer, rows = load_tokenizer(self.target), target_text_config(self.target).vocab_size
            stop_ids = stop_token_ids(load_generation_config(self.target), tokenizer)
            chosen = resolve_mask_token_id(None, tokenizer, rows, stop_ids)
        except TargetError as error:
            return Verdict("mask token", "fails", str(error))
        except ConfigError as error:
            return Verdict("mask token", "doubtful", f"none by default, a training has to name one. {error}")
        token = tokenizer.convert_ids_to_tokens(chosen)
        return Verdict("mask token", "ok", f"{chosen}, {'a row that no token uses' if token is None else token}")

    def _data(self) -> Verdict:
        info, samples = load_data(self.data)
        self._check_targets_data(info)
        tokens = sum(len(sample.input_ids) for sample in samples)
        return Verdict("data", "ok", f"{self.data} holds {counted(len(samples), 'sample')}, {counted(tokens, 'token')}")

    def _check_targets_data(self, info: DataInfo) -> None:
        if self.target is not None and not info.target.fits(target_identity(self.target)):
            raise DataError(
                f"{self.data} has the answers of {info.target.name}, which isn't {self.target}. Prepare it anew."
            )

    def _cache(self) -> Verdict:
        cache = FeatureCache(self.cache)
        manifest = cache.manifest
        identity = None if self.target is None else target_identity(self.target)
        cache.check_compatible(identity, manifest.target_layer_ids, manifest.hidden_size)
        counts = f"{counted(len(cache), 'sample')}, {counted(cache.num_tokens, 'token')}"
        found = f"{self.cache} holds {counts}, {decimal(cache.num_bytes)}"
        if self.data is not None:
            info, _ = load_data(self.data)
            if info.dataset_sha256 != manifest.dataset_sha256:
                return Verdict(
                    "cache",
                    "doubtful",
                    f"{found}; it was captured from other data than {self.data}",
                    "Capture a new cache.",
                )
        return Verdict("cache", "ok", found)
