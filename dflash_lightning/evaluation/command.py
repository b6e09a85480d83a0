"""The command ``evaluate``: a report over many prompts, from real decoding."""

import json as json_format
from datetime import timedelta
from inspect import signature
from io import BytesIO
from pathlib import Path
from typing import Any

import torch

from dflash_lightning.decoding.sampling import make_scheme
from dflash_lightning.devices import Dtype, resolve_device
from dflash_lightning.distributed import gather_when_all_are_done, launched_place, world_of_all
from dflash_lightning.durable import write_whole
from dflash_lightning.errors import ConfigError
from dflash_lightning.evaluation.job import EvaluationJob
from dflash_lightning.evaluation.questioning import Questioning
from dflash_lightning.evaluation.report import summarize
from dflash_lightning.evaluation.table import print_report
from dflash_lightning.export import load_drafter
from dflash_lightning.prompts.sets import read_evaluation_prompts
from dflash_lightning.target import (
    load_generation_config,
    load_tokenizer,
    stop_token_ids,
    target_text_config,
)
from dflash_lightning.wording import counted
from dflash_lightning.writable import check_writable

PLOT_SUFFIXES = (".png", ".svg", ".pdf")
# The first waits for the last; one that has ended is noticed at once.
MEETING_TIMEOUT = timedelta(hours=24)
GO_ON = "Give the same command again: with --json it goes on with the prompts that aren't finished."


def complete_sampling(sampling: dict[str, Any]) -> dict[str, Any]:
    """All settings of `make_scheme` but the device, those that were left out with its defaults."""
    bound = signature(make_scheme).bind(**sampling)
    bound.apply_defaults()
    return {name: value for name, value in bound.arguments.items() if name != "device"}


def journal_folder(report: Path) -> Path:
    """Where the finished prompts of a report are kept."""
    return report.with_name(f"{report.name}.journal")


def check_outputs(json: Path | None, plot: Path | None) -> None:
    """Find out now, not after hours of decoding, that a file can't be written.

    Raises:
        ConfigError: a file can't be written, or the plot's ending is of no format.
    """
    if plot is not None and plot.suffix not in PLOT_SUFFIXES:
        raise ConfigError(f"plot is {plot}; expected a name that ends with {', '.join(PLOT_SUFFIXES)}.")
    if json is not None:
        check_writable("json", json, folder=False)
        check_writable("the journal beside json", journal_folder(json), folder=True)
    if plot is not None:
        check_writable("plot", plot, folder=False)
    for path in filter(None, (json, plot)):
        path.parent.mkdir(parents=True, exist_ok=True)


def evaluate(
    target: str,
    drafter: Path,
    prompts: str,
    limit: int | None = None,
    max_new_tokens: int = 512,
    dtype: Dtype = "bfloat16",
    device: str = "auto",
    thinking: bool | None = None,
    json: Path | None = None,
    plot: Path | None = None,
    **sampling: Any,
) -> dict[str, Any] | None:
    """Decode prompts for real, with and without the drafter, and report acceptance length, speed and losslessness.

    The speed-up is quoted against the fastest plain decoding of the same target here, whichever dtype that is. Run it
    in one process, or in many under torchrun or srun, which share the prompts. With --json every finished prompt is
    kept beside the report, in FILE.journal: killed at any moment, the same command goes on, with any number of
    processes.

    Args:
        target: folder, hub name or .gguf file of the target.
        drafter: exported folder, or a training checkpoint.
        prompts: JSONL file, a prompt a line: "prompt" (text), "messages" (turns of both, the last one the user's) or
            "turns" (the user's turns, each asked once the one before is answered); or a data set as in prepare; or
            gsm8k, math500, humaneval, mbpp or mt-bench, from the hub or an installed wheel, or NAME=PATH for a copy.
        limit: take only its first prompts; of a set by name the first in the official benchmark's order.
        max_new_tokens: length limit of each text.
        dtype: what target and drafter compute in. Texts are provably equal in float32 only.
        device: where both run; auto takes this process's GPU if there is one.
        thinking: the chat template's thinking switch; as in prepare.
        json: write the report to this file.
        plot: draw the report into this file; its ending says the format (.png, .svg, .pdf).
        sampling: temperature and the rest of `make_scheme`; greedy without.

    Returns:
        The report; None in all but the first of several processes.

    Raises:
        DataError: the prompts are malformed, or FILE.journal belongs to another target, drafter, prompts or settings.
        ConfigError, ExportError, TargetError: each says what was found, what was expected and what to do.
        LostRankError: another process ended before it was done.
    """
    place = launched_place()
    where = resolve_device(device, place.local_rank)
    make_scheme(device=where, **sampling)  # refuses bad settings now
    check_outputs(json, plot)
    with world_of_all(place) as world:
        tokenizer = load_tokenizer(target)
        prompt_set, rows = read_evaluation_prompts(prompts, limit, several_turns=True)
        stop_ids = list(stop_token_ids(load_generation_config(target), tokenizer))
        limits = {"max_new_tokens": max_new_tokens, "stop_ids": stop_ids}
        questioning = Questioning(tokenizer, thinking, limits, complete_sampling(sampling), where)
        questioning.check_room(rows, target_text_config(target).max_position_embeddings)
        draft_model = load_drafter(drafter, dtype=getattr(torch, dtype), device=where, target=target)
        job = EvaluationJob(target, draft_model, dtype, rows, questioning, place)
        results, plain_speed = job.results(json and journal_folder(json))
        parts = [results]
        if world is not None:
            parts = gather_when_all_are_done(results, world, MEETING_TIMEOUT, "evaluate", GO_ON)
    if place.rank > 0:
        return None
    texts = {number: found for part in parts for number, found in part.items()}
    report = summarize(
        [text for number in sorted(texts) for text in texts[number]],
        draft_model.config.block_size,
        baseline_tokens_per_second=plain_speed,
    )
    work = job.work()
    report |= {"prompt_set": prompt_set, **{name: work[name] for name in ("settings", "target", "drafter")}}
    if json is not None:
        write_whole(json, json_format.dumps(report, indent=2) + "\n")
    if plot is not None:
        from dflash_lightning.evaluation.plot import draw_report  # here, as matplotlib takes a second to import

        title = f"{prompt_set}: {counted(report['prompts'], 'prompt')}, speed-up {report['speedup']:.2f}x"
        picture = BytesIO()
        draw_report(report, title).savefig(picture, dpi=150, format=plot.suffix.removeprefix("."))
        write_whole(plot, picture.getvalue())
    print_report(report)
    return report
