"""Which proposals are accepted more when texts are sampled: the drafter's most likely tokens, or samples of it.

Answers every prompt several times at each temperature with both schemes, in batches, and prints a JSON line each: tau
with its 95 % interval. Then a line a temperature with the difference of the two: both answer the same prompts, so its
interval (prompts drawn with replacement) is narrower than theirs.

    python benchmarks/proposals.py --target runs/quickstart/target --drafter runs/quickstart/export/zlab \\
        --prompts runs/quickstart/heldout.jsonl
"""

import json
from typing import get_args

from decoding_setup import load_setup, setup_parser

from dflash_lightning.decoding.decode import speculative_decode_batch
from dflash_lightning.decoding.sampling import Proposals, make_scheme
from dflash_lightning.decoding.tau import pooled_tau, tau_difference_interval, tau_interval


def main() -> None:
    parser = setup_parser(__doc__, limit=None, max_new_tokens=64, dtype="bfloat16")
    parser.add_argument("--temperatures", nargs="+", type=float, default=[0.7, 1.0])
    parser.add_argument("--repeats", type=int, default=4, help="answers to each prompt")
    options = parser.parse_args()
    loaded = load_setup(options)
    prompts = loaded.prompts
    for temperature in options.temperatures:
        committed: dict[str, list[list[int]]] = {}
        for proposals in get_args(Proposals):
            committed[proposals] = [[] for _ in prompts]
            for repeat in range(options.repeats):
                scheme = make_scheme(temperature=temperature, proposals=proposals, seed=repeat, device=loaded.device)
                runs = speculative_decode_batch(loaded.target, loaded.drafter, prompts, scheme=scheme, **loaded.limits)
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
        low, high = tau_difference_interval(committed["sampled"], committed["argmax"])
        difference = pooled_tau(committed["sampled"]) - pooled_tau(committed["argmax"])
        result = {"temperature": temperature, "sampled_minus_argmax": difference, "low": low, "high": high}
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
