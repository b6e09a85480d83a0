"""Which proposals are accepted more when texts are sampled: the drafter's most likely tokens, or samples of it.

Answers every prompt several times at each temperature with both schemes, in batches, and prints a JSON line each: tau
with its 95 % interval. Then a line a temperature with the difference of the two: both answer the same prompts, so its
interval (prompts drawn with replacement) is narrower than theirs.

    python benchmarks/proposals.py --target runs/quickstart/target --drafter runs/quickstart/export/zlab \\
        --prompts runs/quickstart/heldout.jsonl
"""

import argparse
import json
from pathlib import Path
from typing import get_args

import numpy as np
import torch

from dflash_lightning.decoding.decode import speculative_decode_batch
from dflash_lightning.decoding.sampling import Proposals, make_scheme
from dflash_lightning.evaluation.prompt_results import load_prompts, pooled_tau, tau_interval
from dflash_lightning.export import load_drafter
from dflash_lightning.target import load_target, load_tokenizer, stop_token_ids

DRAWS = 2000


def difference_interval(committed: list[list[int]], other: list[list[int]]) -> tuple[float, float]:
    """95 % bootstrap interval of the difference of two pooled taus, the same prompts drawn for both."""
    drawn = np.random.default_rng(0).integers(len(committed), size=(DRAWS, len(committed)))

    def taus(rounds: list[list[int]]) -> np.ndarray:
        sums, counts = (
            np.array([measure(r) for r in rounds], dtype=float)[drawn].sum(axis=1) for measure in (sum, len)
        )
        return sums / counts

    low, high = np.quantile(taus(committed) - taus(other), [0.025, 0.975])
    return float(low), float(high)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True)
    parser.add_argument("--drafter", type=Path, required=True, help="exported folder or checkpoint")
    parser.add_argument("--prompts", required=True, help="JSONL file of prompts")
    parser.add_argument("--temperatures", nargs="+", type=float, default=[0.7, 1.0])
    parser.add_argument("--repeats", type=int, default=4, help="answers to each prompt")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    options = parser.parse_args()

    dtype = getattr(torch, options.dtype)
    tokenizer = load_tokenizer(options.target)
    target = load_target(options.target, dtype=dtype)
    drafter = load_drafter(options.drafter, dtype=dtype, target=options.target)
    prompts = [prompt.token_ids for prompt in load_prompts(options.prompts, tokenizer)]
    limits = {"max_new_tokens": options.max_new_tokens, "stop_ids": stop_token_ids(target, tokenizer)}
    for temperature in options.temperatures:
        committed: dict[str, list[list[int]]] = {}
        for proposals in get_args(Proposals):
            committed[proposals] = [[] for _ in prompts]
            for repeat in range(options.repeats):
                scheme = make_scheme(temperature=temperature, proposals=proposals, seed=repeat)
                runs = speculative_decode_batch(target, drafter, prompts, scheme=scheme, **limits)
                for rounds, run in zip(committed[proposals], runs, strict=True):
                    rounds += run.committed
            low, high = tau_interval(committed[proposals])
            result = {
                "temperature": temperature,
                "proposals": proposals,
                "tau": pooled_tau(committed[proposals]),
                "tau_low": low,
                "tau_high": high,
                "rounds": sum(map(len, committed[proposals])),
                "prompts": len(prompts),
            }
            print(json.dumps(result), flush=True)
        low, high = difference_interval(committed["sampled"], committed["argmax"])
        difference = pooled_tau(committed["sampled"]) - pooled_tau(committed["argmax"])
        result = {"temperature": temperature, "sampled_minus_argmax": difference, "low": low, "high": high}
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
