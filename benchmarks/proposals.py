"""Which proposals are accepted more when texts are sampled: the drafter's most likely tokens, or samples of it.

Answers every prompt several times at each temperature with both schemes, in batches, and prints one JSON line each:
tau with its 95 % interval, prompts drawn with replacement.

    python benchmarks/proposals.py --target runs/quickstart/target --drafter runs/quickstart/export/zlab \\
        --prompts runs/quickstart/heldout.jsonl
"""

import argparse
import json
from itertools import product
from pathlib import Path
from typing import get_args

import torch

from dflash_lightning.decoding import speculative_decode_batch
from dflash_lightning.evaluation import load_prompts, pooled_tau, tau_interval
from dflash_lightning.export import load_drafter
from dflash_lightning.sampling import Proposals, make_scheme
from dflash_lightning.target import load_target, load_tokenizer, stop_token_ids


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True)
    parser.add_argument("--drafter", type=Path, required=True, help="exported folder or checkpoint")
    parser.add_argument("--prompts", required=True, help="JSONL file of prompts")
    parser.add_argument("--temperatures", nargs="+", type=float, default=[0.0, 0.7, 1.0])
    parser.add_argument("--repeats", type=int, default=8, help="answers to each prompt")
    parser.add_argument("--max-new-tokens", type=int, default=80)
    options = parser.parse_args()

    tokenizer = load_tokenizer(options.target)
    target = load_target(options.target, dtype=torch.bfloat16)
    drafter = load_drafter(options.drafter, dtype=torch.bfloat16, target=options.target)
    prompts = [prompt.token_ids for prompt in load_prompts(options.prompts, tokenizer)]
    limits = {"max_new_tokens": options.max_new_tokens, "stop_ids": stop_token_ids(target, tokenizer)}
    for temperature, proposals in product(options.temperatures, get_args(Proposals)):
        if temperature == 0 and proposals != "argmax":
            continue
        committed: list[list[int]] = [[] for _ in prompts]
        for repeat in range(options.repeats if temperature else 1):
            scheme = make_scheme(temperature=temperature, proposals=proposals, seed=repeat)
            for rounds, run in zip(
                committed, speculative_decode_batch(target, drafter, prompts, scheme=scheme, **limits), strict=True
            ):
                rounds += run.committed
        low, high = tau_interval(committed)
        result = {
            "temperature": temperature,
            "proposals": proposals,
            "tau": pooled_tau(committed),
            "tau_low": low,
            "tau_high": high,
            "rounds": sum(map(len, committed)),
            "prompts": len(prompts),
        }
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
