"""Cross entropy under a frozen head, forward and backward: ours, torch's own in chunks, and whole logits.

Processor time of one CPU thread (wall time on a GPU), medians of turns; peak memory above inputs, a process each.

    python benchmarks/linear_cross_entropy.py --slots 644 --hidden 576 --vocab 49152
"""

import argparse
import json
import statistics
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import torch
from step_cases import CLOCKS, memory_in_bytes, restart_peak_memory
from torch import Tensor
from torch.nn import LinearCrossEntropyOptions, functional

from dflash_lightning.training.losses import linear_cross_entropy


def ours(hidden: Tensor, head: Tensor, labels: Tensor) -> Tensor:
    return linear_cross_entropy(hidden, head, labels)[0].sum()


def torchs(hidden: Tensor, head: Tensor, labels: Tensor) -> Tensor:
    options = LinearCrossEntropyOptions()
    return functional.linear_cross_entropy(hidden, head, labels, reduction="sum", options=options)


def whole(hidden: Tensor, head: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy((hidden @ head.T).float(), labels, reduction="sum")


FORMS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {"ours": ours, "torch": torchs, "whole": whole}


def make_inputs(options: argparse.Namespace) -> tuple[Tensor, Tensor, Tensor]:
    torch.set_num_threads(1)
    hidden = torch.randn(options.slots, options.hidden).to(options.device, torch.bfloat16).requires_grad_()
    head = torch.randn(options.vocab, options.hidden).mul_(0.05).to(options.device, torch.bfloat16)
    return hidden, head, torch.randint(options.vocab, (options.slots,), device=options.device)


def peak_memory(form: str, options: argparse.Namespace) -> float:
    """MB above the inputs; in a fresh process."""
    inputs = make_inputs(options)
    on_gpu = options.device == "cuda"
    before = torch.cuda.memory_allocated() if on_gpu else restart_peak_memory()
    FORMS[form](*inputs).backward()
    return ((torch.cuda.max_memory_allocated() if on_gpu else memory_in_bytes("VmHWM")) - before) / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slots", type=int, default=644)
    parser.add_argument("--hidden", type=int, default=576)
    parser.add_argument("--vocab", type=int, default=49152)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--output", type=Path, help="JSON lines, appended to")
    options = parser.parse_args()
    memory = {}
    for form in FORMS:
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            memory[form] = pool.submit(peak_memory, form, options).result()
    inputs, clock = make_inputs(options), CLOCKS["wall" if options.device == "cuda" else "cpu"]
    seconds = {form: [] for form in FORMS}
    for _ in range(options.turns + 1):
        for form, function in FORMS.items():
            start = clock()
            function(*inputs).backward()
            if options.device == "cuda":
                torch.cuda.synchronize()
            seconds[form].append(clock() - start)
    for form, measured in seconds.items():
        result = {name: getattr(options, name) for name in ("slots", "hidden", "vocab", "device")}
        result |= {"form": form, "seconds": statistics.median(measured[1:]), "peak_memory_mb": memory[form]}
        print(json.dumps(result))
        if options.output:
            with options.output.open("a") as file:
                file.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
