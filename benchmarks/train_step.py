"""Label tokens/s, peak memory and data wait of the training step, beside a straightforward PyTorch step and the floor.

Three measurements, each on random weights and features, one JSON line a case to --output:

    python benchmarks/train_step.py compare --size quickstart           # ours against reference_drafter.py
    python benchmarks/train_step.py compare --size qwen3-4b-scaled
    python benchmarks/train_step.py growth                              # more anchors, tokens, layers, vocabulary
    python benchmarks/train_step.py fit --target runs/quickstart/target --cache runs/quickstart/cache

The cases take turns, a step each, and medians are reported: other work on the machine then slows all of them alike.
`--clock cpu` (one thread only) counts the processor's time instead of the wall's, for machines that others use too. All
cases train the same samples of one cache with AdamW. Memory is taken in a process of its own: the peak above what
weights, masters and optimizer state take. The floor is the time that the necessary matrix products alone take at the
rate measured in between, in the same dtype and with the same threads.

`fit` runs the real command with the quickstart's configuration. On a GPU `compare` measures FlexAttention against
SDPA too, and takes `--peak-tflops` to state MFU.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections import defaultdict
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from unittest.mock import patch

import torch
from rich.console import Console
from rich.table import Table
from step_cases import (
    CASES,
    CLOCKS,
    MASK_TOKEN_ID,
    SHAPES,
    STEPS_IN_CACHE,
    PeakMemory,
    Shape,
    make_training,
    memory_in_bytes,
    restart_peak_memory,
    write_random_cache,
)
from torch import Tensor

from dflash_lightning.blocks import build_blocks, sample_anchors
from dflash_lightning.cache import FeatureCache
from dflash_lightning.training.fit import fit
from dflash_lightning.visibility import dense_mask

GROWTH = {
    "anchors": [6, 12, 24, 48],
    "tokens": [120, 240, 480, 960],
    "layers": [1, 2, 4, 8],
    "vocab": [12288, 24576, 49152, 98304],
}


def measure_memory(case: str, shape: Shape, folder: Path, options: argparse.Namespace) -> float:
    """Peak MB of two steps above what weights, masters and optimizer state take; in a fresh process."""
    torch.set_num_threads(options.threads)
    trained = make_training(case, shape, FeatureCache(folder), options)
    for weight in trained.drafter.parameters():
        weight.grad = torch.zeros_like(weight)
    trained.update()  # makes the optimizer's state
    if options.device == "cuda":
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
    else:
        before = restart_peak_memory()
    for _ in range(2):
        trained.step()
    peak = torch.cuda.max_memory_allocated() if options.device == "cuda" else memory_in_bytes("VmHWM")
    return (peak - before) / 1e6


def count_flops(shape: Shape, cache: FeatureCache) -> dict[str, float]:
    """Floating point operations that a step can't do without, averaged over the cache's steps; by what they're for.

    A product costs 2 operations an element pair forward, twice that backward; half of that where only one side has a
    gradient: features and head have none. Attention counts visible pairs only, the head supervised slots only.
    """
    context = slots = supervised = pairs = 0
    for index in range(len(cache)):
        sample = cache.read(index)
        anchors = sample_anchors(sample.loss_mask, shape.anchors, seed=0, sample_id=sample.sample_id, epoch=0)
        ids = torch.from_numpy(sample.input_ids).long()[None]
        blocks = build_blocks(
            input_ids=ids,
            loss_mask=torch.from_numpy(sample.loss_mask)[None],
            document_ids=torch.zeros_like(ids),
            anchors=torch.from_numpy(anchors)[None],
            valid=torch.ones(1, len(anchors), dtype=torch.bool),
            block_size=shape.block_size,
            mask_token_id=MASK_TOKEN_ID,
        )
        context += ids.numel()
        slots += blocks.labels.numel()
        supervised += int(blocks.supervised.sum())
        pairs += int(dense_mask(blocks.layout).sum())
    hidden, queries, keys = shape.hidden, shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    layer = 2 * context * hidden * 2 * keys
    layer += 2 * slots * hidden * (2 * keys + 2 * queries + 3 * shape.intermediate)
    layer += 4 * pairs * queries
    fusion = 2 * context * shape.taps * hidden * hidden
    return {
        "layers": (3 * shape.layers * layer + 2 * fusion) / STEPS_IN_CACHE,
        "head": 4 * supervised * shape.vocab * hidden / STEPS_IN_CACHE,
    }


class MatmulRate:
    """FLOP/s of the products that make up the step: slots by an MLP matrix, and supervised slots by the head."""

    def __init__(self, shape: Shape, table: Tensor, options: argparse.Namespace):
        slots = shape.rows * shape.anchors * shape.block_size
        matrix, hidden = (torch.randn(size, shape.hidden).to(table) for size in (shape.intermediate, slots))
        self.operands = {"layers": (hidden, matrix.T), "head": (hidden[:1024], table.T)}
        self.clock, self.wait = CLOCKS[options.clock], torch.cuda.synchronize if table.is_cuda else lambda: None

    def __call__(self, kind: str) -> float:
        a, b = self.operands[kind]
        repeats, out = 0, a @ b
        self.wait()
        start = self.clock()
        while self.clock() - start < 0.1:
            torch.mm(a, b, out=out)
            self.wait()
            repeats += 1
        return repeats * 2 * a.shape[0] * a.shape[1] * b.shape[1] / (self.clock() - start)


def compare(shape: Shape, options: argparse.Namespace, *, with_memory: bool, **labels) -> list[dict]:
    """One result a case: medians over steps in turns."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "cache"
        cache = write_random_cache(place, shape)
        memory = {}
        for case in options.cases if with_memory else ():
            with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
                memory[case] = pool.submit(measure_memory, case, shape, place, options).result()
        trainings = {case: make_training(case, shape, cache, options) for case in options.cases}
        rate = MatmulRate(shape, trainings[options.cases[0]].table, options)
        rates, steps = defaultdict(list), defaultdict(list)
        for number in range(options.steps + 1):
            for case, training in trainings.items():
                measured = training.step()
                if number:  # the first warms up
                    steps[case].append(measured)
            for kind in rate.operands:
                rates[kind].append(rate(kind))
        flops = count_flops(shape, cache)
    floor = sum(flops[kind] / statistics.median(rates[kind]) for kind in flops)
    results = []
    for case in options.cases:
        seconds, counts = zip(*steps[case], strict=True)
        step = statistics.median(s.total for s in seconds)
        gradient = statistics.median(s.gradient for s in seconds)
        result = {
            **labels,
            "case": case,
            "label_tokens_per_second": statistics.mean(counts) / step,
            "step_seconds": step,
            "gradient_seconds": gradient,
            "optimizer_seconds": statistics.median(s.optimizer for s in seconds),
            "data_wait_share": sum(s.data for s in seconds) / sum(s.total for s in seconds),
            "share_of_floor": floor / step,
            "peak_memory_mb": memory.get(case),
            "gflops": sum(flops.values()) / 1e9,
            "matmul_gflops_per_second": {kind: statistics.median(rates[kind]) / 1e9 for kind in flops},
        }
        if options.peak_tflops:
            result["mfu"] = sum(flops.values()) / step / (options.peak_tflops * 1e12)
        results.append(result)
    return results


def fit_job(options: argparse.Namespace) -> list[dict]:
    """The quickstart's `fit` on a given cache: 2 layers, blocks of 8, 24 anchors, 4 samples a step, AdamW, bfloat16."""
    with tempfile.TemporaryDirectory() as folder, patch.object(time, "perf_counter", CLOCKS[options.clock]):
        command = fit(
            [
                *("--config", "conf/quickstart.yaml", "--model.target", options.target, "--data.cache", options.cache),
                *("--trainer.max_steps", str(options.steps), "--trainer.log_every_n_steps", str(options.steps)),
                *(
                    "--trainer.limit_val_batches",
                    "0",
                    "--trainer.default_root_dir",
                    folder,
                    "--trainer.logger",
                    "false",
                ),
                *("--trainer.enable_checkpointing", "false", "--trainer.enable_progress_bar", "false"),
                "--trainer.callbacks=[{class_path: callbacks.Throughput}, {class_path: step_cases.PeakMemory}]",
            ]
        )
    (memory,) = (callback for callback in command.trainer.callbacks if isinstance(callback, PeakMemory))
    metrics = command.trainer.callback_metrics
    values = {name.removeprefix("perf/"): value.item() for name, value in metrics.items() if name.startswith("perf/")}
    return [{"case": "fit", "clock": options.clock, **values, "rise_of_peak_memory_mb": memory.rise}]


def show(results: list[dict], console: Console) -> None:
    columns = [name for name, value in results[0].items() if not isinstance(value, dict)]
    table = Table(*columns)
    for result in results:
        cells = [result[name] for name in columns]
        table.add_row(*(f"{cell:,.3g}" if isinstance(cell, float) else str(cell) for cell in cells))
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("measurement", choices=["compare", "growth", "fit"])
    parser.add_argument("--size", choices=SHAPES, default="quickstart")
    parser.add_argument("--steps", type=int, default=5, help="timed steps of each case")
    parser.add_argument("--cases", nargs="+", choices=CASES)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads")
    parser.add_argument("--clock", choices=CLOCKS, default="wall", help="cpu: processor time, with one thread only")
    parser.add_argument("--peak-tflops", type=float, help="the device's published rate in this dtype, to state MFU")
    parser.add_argument("--target", help="fit: the quickstart's target")
    parser.add_argument("--cache", help="fit: a cache of its texts")
    parser.add_argument("--output", type=Path, help="JSON lines, appended to")
    options = parser.parse_args()
    options.cases = options.cases or ["ours", *(["ours-sdpa"] if options.device == "cuda" else []), "reference"]
    torch.set_num_threads(options.threads)
    console = Console(width=200)
    if options.clock == "cpu" and (options.device, options.threads) != ("cpu", 1):
        parser.error("--clock cpu adds up the time of all threads, and knows none of a GPU's; take --threads 1 on CPU")
    shape = SHAPES[options.size]
    named = {
        "size": options.size,
        **{name: getattr(options, name) for name in ("device", "dtype", "threads", "clock")},
    }
    if options.measurement == "fit":
        results = fit_job(options)
    elif options.measurement == "compare":
        results = compare(shape, options, with_memory=True, **named)
    else:
        grown = [(name, value) for name, values in GROWTH.items() for value in values]
        results = [
            result
            for name, value in grown
            for result in compare(
                replace(shape, **{name: value}), options, with_memory=False, grows=name, value=value, **named
            )
        ]
    show(results, console)
    if options.output:
        with options.output.open("a") as file:
            file.writelines(json.dumps(result) + "\n" for result in results)


if __name__ == "__main__":
    main()
