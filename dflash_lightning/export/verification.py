"""The proof that an exported drafter decodes: in float32 the target alone, our decoder and transformers' own agree.

"Train accuracy 98 %, served acceptance 10 %" comes from a folder that says something else than what was trained: rotary
settings, layer offsets, a mask token. Such a folder decodes correctly, only slowly, so it shows in tau alone, and where
tau is near 1 not even there. Hence the drafter's hidden states are compared as well.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import ModelOutput

from dflash_lightning.config import DrafterConfig
from dflash_lightning.decoding.decode import plain_decode, speculative_decode
from dflash_lightning.decoding.tau import pooled_tau
from dflash_lightning.decoding.ties import is_tie
from dflash_lightning.devices import free_memory
from dflash_lightning.drafter import Drafter
from dflash_lightning.errors import ExportError, TargetError
from dflash_lightning.export.card import Verification
from dflash_lightning.export.folder import export_drafter
from dflash_lightning.export.format import rope_parameters
from dflash_lightning.export.layout import tensor_shapes
from dflash_lightning.export.loading import load_drafter, read_drafter
from dflash_lightning.export.muse_assistant import TRANSFORMERS
from dflash_lightning.export.transformers_check import generate_with_transformers, load_assistant
from dflash_lightning.progress import say, track
from dflash_lightning.prompts.rows import PromptRow, prompt_token_ids, read_prompts
from dflash_lightning.target import load_target, load_tokenizer, stop_token_ids
from dflash_lightning.target.files import find_target, loading
from dflash_lightning.target.loading import config_of
from dflash_lightning.wording import counted

BUILT_IN = "built-in"
# Activations, caches and what loading takes for a moment, besides the weights.
MEMORY_MARGIN = 1.2
# Float32 leaves some 1e-6 of difference between two implementations; a wrong rotation or layer 1e-1.
LARGEST_DIFFERENCE = 1e-3
# Answers are regular, so that some blocks are accepted early in a training already.
PROMPTS = (
    "Count from 1 to 20, separated by commas.",
    "Write the days of the week in order, one on each line.",
    "Write a Python function that returns the factorial of a number.",
)


@dataclass(frozen=True)
class VerificationSettings:
    """What is decoded before exported folders are called good.

    Attributes:
        target: folder, hub name or .gguf file.
        device: where target and drafter run.
        prompts: JSONL file or data set, as in prepare; None for a few short prompts that are built in.
        max_new_tokens: length limit of each text.
        thinking: the chat template's thinking switch; None leaves it at its default.
    """

    target: str
    device: torch.device
    prompts: str | None
    max_new_tokens: int
    thinking: bool | None


@dataclass(frozen=True)
class _Decoded:
    """One prompt by all decoders; transformers' part is None for a drafter that it can't express."""

    name: str
    prompt_ids: list[int]
    plain: list[int]
    ours: list[int]
    committed: list[int]
    theirs: list[int] | None
    their_committed: list[int] | None
    differences: list[float]
    """Of the drafter's hidden states of each block, ours and transformers', relative to their norm."""

    @property
    def differing(self) -> dict[str, list[int]]:
        """The texts that aren't the plain one, by decoder."""
        texts = {"our decoder": self.ours, "transformers": self.theirs}
        return {name: text for name, text in texts.items() if text not in (None, self.plain)}


def why_not(target: str | None, device: torch.device, config: DrafterConfig) -> str | None:
    """Why a drafter can't be verified here; None if it can: the target is known, and fits the memory in float32."""
    if target is None:
        return "the target isn't known; name it by --target"
    try:
        files = find_target(target)
        with loading("configuration", files), torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config_of(files))
    except TargetError as error:
        return str(error)
    drafter = sum(torch.Size(shape).numel() for shape in tensor_shapes(config).values())
    # Ours and transformers' drafter.
    needed = 4 * (sum(weight.numel() for weight in model.parameters()) + 2 * drafter)
    needed = int(needed * MEMORY_MARGIN)
    free = free_memory(device)
    if needed <= free:
        return None
    return f"target and drafter take {needed / 1e9:.1f} GB in float32, and {free / 1e9:.1f} GB are free on {device}"


def verify_folders(folders: Mapping[str, Path], settings: VerificationSettings) -> Verification:
    """Decode with what stands in exported folders, and compare texts and accepted lengths.

    Our decoder reads the first folder, transformers the one of its own format, or one that is made for the moment from
    what was read in the first. The weights are those of the folder, in whatever dtype they are; they compute in
    float32, where rounding doesn't decide which token is the likeliest.

    Args:
        folders: by format; all hold the same drafter.

    Raises:
        ExportError: naming prompt, token and both taus where texts or accepted lengths differ; or there was nothing to
            compare.
    """
    first = next(iter(folders.values()))
    tokenizer = load_tokenizer(settings.target)
    rows = _rows(settings.prompts)
    prompts = [prompt_token_ids(row, tokenizer, settings.thinking) for row in rows]
    target = load_target(settings.target, dtype=torch.float32, device=settings.device)
    drafter = load_drafter(first, dtype=torch.float32, device=settings.device)
    limits = {"max_new_tokens": settings.max_new_tokens, "stop_ids": stop_token_ids(target, tokenizer)}
    decoded = []
    with _assistant(folders, target) as assistant, track(len(rows), "verify", "tokens") as progress:
        for number, (row, prompt_ids) in enumerate(zip(rows, prompts, strict=True), start=1):
            name = f"prompt {number} ({row.prompt[:40]!r})"
            decoded.append(_decode(name, target, drafter, assistant, prompt_ids, limits))
            progress.advance(1, done=len(decoded[-1].plain))
    name = BUILT_IN if settings.prompts is None else Path(settings.prompts).stem
    verification = _compare(decoded, target, name, settings.max_new_tokens)
    say(f"verified: {verification.summary()}")
    return verification


def _rows(prompts: str | None) -> list[PromptRow]:
    if prompts is not None:
        return read_prompts(prompts)
    return [
        PromptRow(text, [{"role": "user", "content": text}], bare=True, response=None, finish_reason="stop", place=text)
        for text in PROMPTS
    ]


@contextmanager
def _assistant(folders: Mapping[str, Path], target: PreTrainedModel) -> Iterator[PreTrainedModel | None]:
    """The drafter as transformers' own model; None if that can't express it."""
    if TRANSFORMERS.name in folders:
        yield load_assistant(folders[TRANSFORMERS.name], target)
        return
    first = next(iter(folders.values()))
    source = read_drafter(first)
    if "partial_rotary_factor" in rope_parameters(source.config):
        yield None
        return
    with TemporaryDirectory(dir=first, prefix=".verify.") as scratch:
        folder = export_drafter(
            source.weights,
            source.config,
            Path(scratch) / TRANSFORMERS.name,
            TRANSFORMERS,
            tokens=source.tokens,
            dtype=source.dtype,
        )
        yield load_assistant(folder, target)


def _decode(
    name: str,
    target: PreTrainedModel,
    drafter: Drafter,
    assistant: PreTrainedModel | None,
    prompt_ids: list[int],
    limits: dict[str, Any],
) -> _Decoded:
    plain = plain_decode(target, prompt_ids, **limits)
    with _recorded(drafter) as our_blocks:
        ours = speculative_decode(target, drafter, prompt_ids, **limits)
    theirs, differences = (None, None), []
    if assistant is not None:
        with _recorded(assistant) as blocks:
            theirs = generate_with_transformers(target, assistant, prompt_ids, **limits)
        # Where a single token is left to the length limit, transformers doesn't draft.
        differences = [float((a - b).norm() / b.norm()) for a, b in zip(our_blocks, blocks, strict=False)]
    return _Decoded(name, prompt_ids, plain.token_ids, ours.token_ids, ours.committed, *theirs, differences)


@contextmanager
def _recorded(drafter: torch.nn.Module) -> Iterator[list[Tensor]]:
    """The hidden states [1, B, H] of every block that is drafted meanwhile."""
    blocks: list[Tensor] = []
    hook = drafter.register_forward_hook(lambda _module, _inputs, output: blocks.append(_hidden(output)))
    try:
        yield blocks
    finally:
        hook.remove()


def _hidden(output: Tensor | ModelOutput) -> Tensor:
    return output if isinstance(output, Tensor) else output.last_hidden_state


def _compare(
    decoded: Sequence[_Decoded], target: PreTrainedModel, prompt_set: str, max_new_tokens: int
) -> Verification:
    """What agreed, or an ExportError about the first that doesn't."""
    agreeing, taus = [], _taus(decoded)
    for one in decoded:
        if not one.differing:
            agreeing.append(one)
        for decoder, text in one.differing.items():
            if not is_tie(target, one.prompt_ids, one.plain, text):
                raise _refused(_text_differs(one, decoder, text), taus, len(decoded))
    for one in agreeing:
        if one.their_committed not in (None, one.committed):
            raise _refused(_rounds_differ(one), taus, len(decoded))
        if not all(difference <= LARGEST_DIFFERENCE for difference in one.differences):  # NaN as well
            raise _refused(_blocks_differ(one), taus, len(decoded))
    ours, theirs = _taus(agreeing)
    if ours is None:
        raise ExportError(
            f"The export is refused: {counted(len(decoded), 'prompt')} decoded to verify it, and none gave a verify "
            "round to compare. Give other prompts by --prompts, or export with --verify false."
        )
    return Verification(
        prompt_set,
        prompts=len(decoded),
        ties=len(decoded) - len(agreeing),
        max_new_tokens=max_new_tokens,
        tau=ours,
        transformers_tau=theirs,
        largest_difference=max((d for one in agreeing for d in one.differences), default=None),
    )


def _taus(decoded: Sequence[_Decoded]) -> tuple[float | None, float | None]:
    """Of our decoder and of transformers."""
    return pooled_tau(one.committed for one in decoded), pooled_tau(one.their_committed or () for one in decoded)


def _text_differs(one: _Decoded, decoder: str, text: list[int]) -> str:
    pairs = enumerate(zip(one.plain, text, strict=False))
    parting = next((i for i, (plain, other) in pairs if plain != other), None)
    if parting is None:
        where = f"has {len(text)} tokens, the target's plain greedy text {len(one.plain)}"
    else:
        where = (
            f"parts from the target's plain greedy text at new token {parting + 1}: token {text[parting]} instead of "
            f"{one.plain[parting]}, and not at a tie"
        )
    return (
        f"{one.name}: the text of {decoder} {where}. No drafter may change the text: check that transformers "
        f"{transformers.__version__} computes a block of tokens at once as it does one by one, for this target"
    )


def _rounds_differ(one: _Decoded) -> str:
    lengths = zip([*one.committed, 0], [*one.their_committed, 0], strict=False)
    number, (ours, theirs) = next((i, pair) for i, pair in enumerate(lengths) if pair[0] != pair[1])
    token = 2 + sum(one.committed[:number])
    return (
        f"{one.name}: from new token {token} (round {number + 1}) our decoder commits {ours} tokens and transformers "
        f"{theirs}, of the same text. {_read_differently()}"
    )


def _blocks_differ(one: _Decoded) -> str:
    number, difference = next((i, d) for i, d in enumerate(one.differences) if not d <= LARGEST_DIFFERENCE)
    token = 2 + sum(one.committed[:number])
    return (
        f"{one.name}: at new token {token} (round {number + 1}) the drafter's hidden states of the block differ by "
        f"{difference:.1%} between our decoder and transformers. {_read_differently()}"
    )


def _read_differently() -> str:
    return (
        "They read the drafter differently: check rope_parameters, target_layer_ids, mask_token_id, rms_norm_eps and "
        f"block_size in its config.json, and transformers ({transformers.__version__})"
    )


def _refused(problem: str, taus: tuple[float | None, float | None], count: int) -> ExportError:
    ours, theirs = ("-" if tau is None else f"{tau:.3f}" for tau in taus)
    return ExportError(
        f"The export is refused, and no folder was left: {problem}. Over all {count} prompts, in float32, tau is "
        f"{ours} by our decoder and {theirs} by transformers. `--verify false` exports without this proof."
    )
