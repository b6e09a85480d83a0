"""Prompts -> the target's own answers -> tokens with a loss mask: the first stage of the road."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import PreTrainedTokenizerBase

from dflash_lightning.devices import resolve_device
from dflash_lightning.errors import ConfigError, DataError, TargetError
from dflash_lightning.journal import Journal, refuse_other_work
from dflash_lightning.prepare.data import (
    INFO,
    JOURNAL,
    SKIPPED,
    DataInfo,
    PreparedSample,
    dataset_sha256,
    load_data,
    read_info,
    write_data,
)
from dflash_lightning.prepare.greedy import GreedyAnswer, greedy_answers
from dflash_lightning.progress import say, track
from dflash_lightning.prompts.rows import PromptRow, prompt_token_ids, read_prompts, rows_record
from dflash_lightning.target import (
    load_generation_config,
    load_target,
    load_tokenizer,
    stop_token_ids,
    target_identity,
    target_text_config,
)
from dflash_lightning.wording import counted
from dflash_lightning.writable import check_writable

__all__ = ["DataInfo", "PreparedData", "PreparedSample", "load_data", "prepare"]

MIN_ANSWER_TOKENS = 2


@dataclass(frozen=True)
class PreparedData:
    """What a call of `prepare` left behind.

    Attributes:
        folder: The data folder.
        info: Its description.
        generated_now: Answers that this call generated itself; 0 if everything was there already.
    """

    folder: Path
    info: DataInfo
    generated_now: int


@dataclass(frozen=True)
class _Stage:
    """What the whole stage shares: how questions become tokens and tokens become answers."""

    target: str
    tokenizer: PreTrainedTokenizerBase
    stop_ids: tuple[int, ...]
    context: int
    generation: dict[str, Any]
    batch_size: int
    device: torch.device


@dataclass(frozen=True)
class _Question:
    """A row in tokens: its prompt, and its answer if it came with one."""

    row: PromptRow
    prompt_ids: list[int]
    given: GreedyAnswer | None
    too_long: str | None


def prepare(
    target: str,
    input: str,
    output: Path,
    limit: int | None = None,
    max_new_tokens: int = 256,
    max_prompt_tokens: int | None = None,
    batch_size: int = 128,
    dtype: Literal["bfloat16", "float32"] = "bfloat16",
    device: str = "auto",
    thinking: bool | None = None,
) -> PreparedData:
    """Let the target answer prompts greedily, and store prompts and answers as tokens with a loss mask.

    A drafter learns what its target says, so the answers must be the target's own. Rows that come with a `response`
    are taken to be answered by this target already and are used as they are. Every finished batch is kept in a
    journal: a run that was killed goes on where it was when the same command is given again, and gives the same data.

    Args:
        target: The target: a transformers folder, a hub name, or the path of a .gguf file.
        input: JSONL file, a row a line: "prompt" (text) or "messages" (turns, the last one the user's); optional
            "id", "response" with "finish_reason" ("stop" or "length"), and any further keys, which are kept. Or a data
            set of the hub or a local folder, as hf:NAME[,config=NAME][,split=train][,column=prompt].
        output: Folder for the data: samples.jsonl, skipped.jsonl and data.json.
        limit: Take only the first rows of the input.
        max_new_tokens: Longest answer, in tokens.
        max_prompt_tokens: Longest prompt, in tokens; longer ones are skipped. By default what leaves room for the
            longest answer in the target's context.
        batch_size: Prompts that are answered at the same time.
        dtype: Data type that the target computes in.
        device: Where the target runs: cpu, cuda, or auto, which takes a GPU if there is one.
        thinking: Sets the chat template's thinking switch; by default it stays as the template has it.

    Raises:
        ConfigError: A setting is out of range.
        DataError: The input is malformed (file and line are named, nothing was written), or the folder holds the
            data of another target, other settings or another input.
        TargetError: The target can't be loaded.
    """
    for setting, value, least in (("max_new_tokens", max_new_tokens, MIN_ANSWER_TOKENS), ("batch_size", batch_size, 1)):
        if value < least:
            raise ConfigError(f"{setting} is {value}; expected {least} or more.")
    where = resolve_device(device)
    output = Path(output)
    done = read_info(output)
    if done is None:
        check_writable("output", output, folder=True)
    rows = read_prompts(input, limit)
    tokenizer = load_tokenizer(target)
    stop_ids = stop_token_ids(load_generation_config(target), tokenizer)
    if not stop_ids:
        raise TargetError(f"Target {target!r} has no stop token: neither its tokenizer nor its defaults name an eos.")
    context = target_text_config(target).max_position_embeddings
    longest_prompt = _longest_prompt(context, max_new_tokens, max_prompt_tokens)
    generation = {
        "mode": "chat" if tokenizer.chat_template else "plain",
        "thinking": thinking,
        "max_new_tokens": max_new_tokens,
        "max_prompt_tokens": longest_prompt,
        "decoding": "greedy",
        "dtype": dtype,
    }
    stage = _Stage(target, tokenizer, stop_ids, context, generation, batch_size, where)
    questions = [_question(row, stage) for row in rows]
    identity = target_identity(target)
    work = {"target": asdict(identity), "generation": generation, "input": rows_record(rows)}

    if done is not None:
        refuse_other_work(output / INFO, {key: asdict(done)[key] for key in work}, work)
        if (output / JOURNAL).exists():  # else nothing is written: the folder may be read only
            (output / JOURNAL).unlink(missing_ok=True)
        return _finished(PreparedData(output, done, 0))
    with _one_message_when_full(output):
        output.mkdir(parents=True, exist_ok=True)
        with Journal(output / JOURNAL, {**work, "batch_size": batch_size}) as journal:
            refuse_other_work(journal.path, journal.header, {**work, "batch_size": batch_size})
            before = sum(len(entry["answers"]) for entry in journal.entries)
            answers = _answer(questions, journal, stage)
            samples, skipped = _samples(questions, answers, stage)
            if not samples:
                journal.path.unlink()
                raise DataError(
                    f"{input}: all {counted(len(skipped), 'row')} are skipped, the first one ({skipped[0]['id']}) "
                    f"because {skipped[0]['reason']}. Give other prompts, or change the limits."
                )
            sha256, counts = dataset_sha256(samples), _counts(samples, len(skipped))
            info = DataInfo(identity, generation, work["input"], sha256, counts)
            write_data(output, info, samples, skipped)
            journal.path.unlink()
    return _finished(PreparedData(output, info, len(answers) - before))


def _longest_prompt(context: int, max_new_tokens: int, max_prompt_tokens: int | None) -> int:
    """Most tokens of a prompt, so that the longest answer still finds room in the target's context."""
    if max_new_tokens >= context:
        raise ConfigError(
            f"max_new_tokens is {max_new_tokens}, and the target's context holds {context} tokens, those of the prompt "
            f"included. Give fewer than {context}, and so many fewer as prompts have tokens."
        )
    if max_prompt_tokens is None:
        return context - max_new_tokens
    if not 1 <= max_prompt_tokens <= context - max_new_tokens:
        raise ConfigError(
            f"max_prompt_tokens is {max_prompt_tokens}; expected 1 to {context - max_new_tokens}, the target's context "
            f"of {context} tokens less max_new_tokens, {max_new_tokens}. Lower one of them, or leave max_prompt_tokens "
            "out."
        )
    return max_prompt_tokens


def _finished(data: PreparedData) -> PreparedData:
    counts = data.info.counts
    skipped = f"{counts['skipped']} skipped"
    if counts["skipped"]:
        skipped += f" (why: {data.folder / SKIPPED})"
    say(
        f"{data.folder}: {counted(counts['samples'], 'sample')}, {counts['given']} answers given, "
        f"{counts['generated']} generated ({data.generated_now} now), {skipped}; {counted(counts['tokens'], 'token')}, "
        f"{counts['response_tokens']:,} of answers"
    )
    return data


def _question(row: PromptRow, stage: _Stage) -> _Question:
    prompt_ids = prompt_token_ids(row, stage.tokenizer, stage.generation["thinking"])
    longest_prompt = stage.generation["max_prompt_tokens"]
    given, too_long = None, None
    if row.response is not None:
        ids = stage.tokenizer(row.response, add_special_tokens=False).input_ids
        if len(ids) < MIN_ANSWER_TOKENS:
            raise DataError(
                f"{row.place}: `response` has {counted(len(ids), 'token')}, expected {MIN_ANSWER_TOKENS} or more: a "
                "shorter one has nothing to draft. Remove the row, or leave `response` out to have it generated."
            )
        if row.finish_reason == "stop" and ids[-1] not in stage.stop_ids:
            eos = stage.tokenizer.eos_token_id
            ids.append(eos if eos in stage.stop_ids else stage.stop_ids[0])
        given = GreedyAnswer(ids, row.finish_reason)
        if len(prompt_ids) + len(ids) > stage.context:
            total = len(prompt_ids) + len(ids)
            too_long = f"prompt and answer have {total} tokens, the target's context holds {stage.context}"
    if len(prompt_ids) > longest_prompt:
        too_long = (
            f"the prompt has {counted(len(prompt_ids), 'token')}, the limit is {longest_prompt} (the target's context "
            f"of {stage.context} less max_new_tokens, or max_prompt_tokens)"
        )
    return _Question(row, prompt_ids, given, too_long)


def _answer(questions: list[_Question], journal: Journal, stage: _Stage) -> dict[str, GreedyAnswer]:
    """Generate the answers that are missing, batch by batch; returns all generated ones, by row id.

    The batches follow from the data alone (prompts of like length together), so that a resumed run computes the very
    batches that an uninterrupted one would have.
    """
    open_questions = [q for q in questions if q.given is None and q.too_long is None]
    open_questions.sort(key=lambda q: len(q.prompt_ids), reverse=True)
    size = stage.batch_size
    batches = [open_questions[i : i + size] for i in range(0, len(open_questions), size)]
    answers = {
        row_id: GreedyAnswer(token_ids, finish_reason)
        for entry in journal.entries
        for row_id, token_ids, finish_reason in entry["answers"]
    }
    missing = [batch for batch in batches if batch[0].row.id not in answers]
    if not missing:
        return answers
    model = load_target(stage.target, dtype=getattr(torch, stage.generation["dtype"]), device=stage.device)
    limits = {"stop_ids": stage.stop_ids, "max_new_tokens": stage.generation["max_new_tokens"]}
    with track(sum(len(batch) for batch in missing), "Answers", "tokens") as progress:
        for batch in missing:
            found = greedy_answers(model, [question.prompt_ids for question in batch], **limits)
            by_id = {question.row.id: answer for question, answer in zip(batch, found, strict=True)}
            entry = [[row_id, answer.token_ids, answer.finish_reason] for row_id, answer in by_id.items()]
            journal.append({"answers": entry})
            answers.update(by_id)
            progress.advance(len(batch), sum(len(answer.token_ids) for answer in found))
    return answers


def _samples(
    questions: list[_Question], answers: dict[str, GreedyAnswer], stage: _Stage
) -> tuple[list[PreparedSample], list[dict[str, str]]]:
    """Join questions and answers in the order of the input; returns the samples, and what was left out and why."""
    samples, skipped = [], []
    for question in questions:
        row, reason = question.row, question.too_long
        answer = question.given or answers.get(row.id)
        if reason is None:
            text_ids = answer.token_ids[:-1] if answer.token_ids[-1] in stage.stop_ids else answer.token_ids
            if len(text_ids) < MIN_ANSWER_TOKENS:
                reason = f"the answer has {counted(len(text_ids), 'token')}, expected {MIN_ANSWER_TOKENS} or more"
        if reason is not None:
            skipped.append({"id": row.id, "reason": reason})
            continue
        samples.append(
            PreparedSample(
                id=row.id,
                question=row.question(),
                response=row.response if row.response is not None else stage.tokenizer.decode(text_ids),
                finish_reason=answer.finish_reason,
                source="generated" if question.given is None else "given",
                input_ids=question.prompt_ids + answer.token_ids,
                response_start=len(question.prompt_ids),
                extra=row.extra,
            )
        )
    return samples, skipped


def _counts(samples: list[PreparedSample], num_skipped: int) -> dict[str, int]:
    given = sum(sample.source == "given" for sample in samples)
    return {
        "samples": len(samples),
        "given": given,
        "generated": len(samples) - given,
        "skipped": num_skipped,
        "tokens": sum(len(sample.input_ids) for sample in samples),
        "response_tokens": sum(len(sample.input_ids) - sample.response_start for sample in samples),
    }


@contextmanager
def _one_message_when_full(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise DataError(
            f"{folder}: no space left on the disk. The answers so far are kept; free some space and run this again."
        ) from error
