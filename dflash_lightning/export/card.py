"""What is told about an exported drafter: `dflash_lightning.json` for programs, `README.md` for people."""

import platform
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from dflash_lightning import __version__
from dflash_lightning.cache import TargetIdentity
from dflash_lightning.checkpoints import TrainingCheckpoint
from dflash_lightning.config import DrafterConfig
from dflash_lightning.export.format import Format, TokenIds
from dflash_lightning.wording import counted

METADATA_FILE, CARD_FILE = "dflash_lightning.json", "README.md"
# The card of somebody else's folder that ours was converted from: its licence, its results.
ORIGINAL_CARD_FILE = "README.original.md"
ORIGINAL_CARD = f"""
Converted from somebody else's folder; its own card, with what it says of the licence, is
[{ORIGINAL_CARD_FILE}]({ORIGINAL_CARD_FILE}).
"""
UNKNOWN = "not known"


@dataclass(frozen=True)
class Provenance:
    """Where a drafter comes from and what was measured of it.

    Attributes:
        target: identity of the target that it was trained for.
        checkpoint: name of the checkpoint's folder or file.
        step: optimizer steps taken.
        code_version: version of `dflash_lightning` that trained it.
        start_from: name of the drafter whose weights training began with; None: random weights.
        generation: how the answers it was trained on were made (thinking or not, ...); None if not known.
        evaluations: one entry a prompt set: `prompt_set` and figures such as `tau`, `tau_low`, `tau_high`, `prompts`.
    """

    target: TargetIdentity
    checkpoint: str
    step: int
    code_version: str
    start_from: str | None = None
    generation: dict[str, Any] | None = None
    evaluations: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    def of_checkpoint(cls, checkpoint: TrainingCheckpoint) -> "Provenance":
        start_from = checkpoint.start_from and Path(checkpoint.start_from).name
        return cls(checkpoint.target, checkpoint.path.name, checkpoint.step, checkpoint.code_version, start_from)

    @classmethod
    def from_dict(cls, metadata: dict[str, Any]) -> "Provenance | None":
        """The inverse of ``metadata``; None where it says nothing of the making."""
        made = metadata.get("provenance")
        return made and cls(**{**made, "target": TargetIdentity(**made["target"])})


@dataclass(frozen=True)
class Verification:
    """What was decoded with a folder before it took its name, in float32, by three decoders that agreed.

    Attributes:
        prompt_set: name of the prompts.
        prompts: how many.
        ties: of these, texts that part where the target's two logits are equal up to rounding; they don't count in tau.
        max_new_tokens: length limit of each text.
        tau: by our decoder.
        transformers_tau: by transformers; None for a drafter that it can't express.
        largest_difference: of the drafter's hidden states of a block between the two, relative to their norm.
    """

    prompt_set: str
    prompts: int
    ties: int
    max_new_tokens: int
    tau: float
    transformers_tau: float | None
    largest_difference: float | None

    def summary(self) -> str:
        """One sentence, without a full stop."""
        decoders, both = "our decoder and transformers' generate()", " in both"
        if self.largest_difference is not None:
            both += f", and the drafter's hidden states differ by {self.largest_difference:.0e} at most"
        if self.transformers_tau is None:
            decoders, both = "our decoder (transformers has no drafter that rotates a part of each head)", ""
        tied = f"; {self.ties} part from it at a tie of two logits" if self.ties else ""
        return (
            f"in float32, {decoders} gave the target's plain greedy text for {self.prompts - self.ties} of "
            f"{counted(self.prompts, 'prompt')} ({self.prompt_set}, at most {self.max_new_tokens} tokens each), tau "
            f"{self.tau:.3f}{both}{tied}"
        )


def metadata(
    config: DrafterConfig,
    form: Format,
    dtype: str,
    tokens: TokenIds,
    provenance: Provenance | None,
    verification: Verification | None,
) -> dict[str, Any]:
    """Content of `dflash_lightning.json`."""
    return {
        "format": form.name,
        "dtype": dtype,
        "drafter": config.to_dict(),
        # Not every format has room for all of them.
        "target_tokens": asdict(tokens),
        "provenance": provenance and asdict(provenance),
        "verification": verification and asdict(verification),
        "exported_with": {
            "dflash_lightning": __version__,
            "python": platform.python_version(),
            **{package: version(package) for package in ("torch", "transformers", "safetensors")},
        },
    }


def model_card(
    config: DrafterConfig,
    form: Format,
    dtype: str,
    provenance: Provenance | None,
    verification: Verification | None,
    converted: bool,
) -> str:
    """Content of `README.md`; ``converted`` from a folder whose own card lies beside it."""
    target = provenance.target.name if provenance else "TARGET"
    # Only a target from the hub has a name that others can resolve.
    base = f"base_model: {target}\n" if provenance and provenance.target.revision else ""
    usage = form.usage.format(target=target, num_proposals=config.block_size - 1, block_size=config.block_size)
    return f"""\
---
{base}library_name: transformers
tags:
- speculative-decoding
- dflash
---
# DFlash drafter for {target}

Proposes blocks of {config.block_size - 1} tokens in one forward; the target verifies them, so that the text stays the
target's own. It uses the target's embedding table and LM head and is of no use without that very target.

## Use

`DIR` stands for this folder.

{usage}
## Measured

{_measured(provenance)}
## Verified

{_verified(verification)}
## Made from

{_made_from(config, form, dtype, provenance)}{ORIGINAL_CARD if converted else ""}"""


def _measured(provenance: Provenance | None) -> str:
    if not provenance or not provenance.evaluations:
        return "Nothing was measured when this folder was written.\n"
    lines = [
        "Decoded acceptance length (tau): tokens that a verify forward of the target commits, its own token included.",
        "",
        "| prompts | sample count | tau | 95 % interval |",
        "|---|---|---|---|",
    ]
    for entry in provenance.evaluations:
        interval = f"{entry['tau_low']:.3f} to {entry['tau_high']:.3f}" if entry.get("tau_low") else UNKNOWN
        lines.append(f"| {entry['prompt_set']} | {entry['prompts']} | {entry['tau']:.3f} | {interval} |")
    return "\n".join(lines) + "\n"


def _verified(verification: Verification | None) -> str:
    if verification is None:
        return (
            "The files were read back and hold what was written. Nothing was decoded with them: "
            "`dflash-lightning export --checkpoint DIR --target TARGET` does that.\n"
        )
    return f"Decoded with these weights before the folder was called good: {verification.summary()}.\n"


def _made_from(config: DrafterConfig, form: Format, dtype: str, provenance: Provenance | None) -> str:
    rows = {
        "format": f"{form.name}, {dtype}",
        "layers, block size": f"{config.num_layers}, {config.block_size}",
        "tapped target layers": ", ".join(map(str, config.target_layer_ids)),
        "mask token id": config.mask_token_id,
    }
    if provenance:
        target = provenance.target
        rows |= {
            "target": target.name,
            "target revision": target.revision or UNKNOWN,
            "target weights (SHA-256)": target.weights_sha256,
            "tokenizer (SHA-256)": target.tokenizer_sha256,
            "chat template (SHA-256)": target.chat_template_sha256 or "none",
            "answers generated with": provenance.generation or UNKNOWN,
            "training began with": provenance.start_from or "random weights",
            "training": f"{provenance.checkpoint}, step {provenance.step}",
        }
    trained = f"trained with {provenance.code_version}, " if provenance else ""
    rows["dflash_lightning"] = f"{trained}exported with {__version__}"
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows.items())]) + "\n"
