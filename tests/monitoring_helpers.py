"""A short training with all that it leaves in TensorBoard."""

import json
from pathlib import Path

import yaml
from fit_helpers import checkpoints, fit_config
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from training_helpers import random_sample, write_cache

from dflash_lightning.training.fit import fit

PROMPTS = [{"id": f"p|{i}", "family": "ab"[i % 2], "prompt": f"say *{i * 7}* please"} for i in range(5)]


def write_config(target: Path, folder: Path) -> Path:
    """12 steps, a validation after each third; a checkpoint of every validation stays."""
    samples = [random_sample(f"s{i}", 30 + i, 6, 64, seed=i) for i in range(24)]
    write_cache(folder / "cache", samples, target=target, layer_ids=[1, 3], hidden_size=32)
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps(row) + "\n" for row in PROMPTS))
    decoding = {"prompts": str(prompts), "max_new_tokens": 12}
    callbacks = [
        {"class_path": "callbacks.DecodedAcceptance", "init_args": decoding},
        {"class_path": "callbacks.Throughput"},
        checkpoints(folder, "{step}", save_top_k=-1),
    ]
    config = fit_config(target, folder / "cache", folder, callbacks)
    config["trainer"] |= {"strategy": "auto", "precision": "32-true"}
    config["trainer"]["logger"]["init_args"]["default_hp_metric"] = False
    file = folder / "fit.yaml"
    file.write_text(yaml.safe_dump(config))
    return file


def train_resumed(config: Path) -> Path:
    """The logs of a run that went on from its sixth step after it had done nine: the last three of them count twice."""
    fit(["--config", str(config), "--trainer.max_steps", "9"])
    fit(["--config", str(config), "--resume", str(config.parent / "checkpoints" / "step=6.ckpt")])
    return config.parent / "logs"


def events_of(logs: Path) -> EventAccumulator:
    """All events, none left out."""
    events = EventAccumulator(str(logs), size_guidance={"scalars": 0, "tensors": 0, "histograms": 0, "images": 0})
    return events.Reload()
