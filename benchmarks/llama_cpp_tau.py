"""tau and texts of a running llama.cpp server beside ours, both greedy and with the same tokens of each prompt.

docs/serving.md says how to convert target and drafter and to start the server. Prints a JSON line: tau of both, pooled
over the prompts; texts that are equal, and texts that part at a tie.

    python benchmarks/llama_cpp_tau.py --server http://127.0.0.1:8080 --target runs/quickstart/target \\
        --drafter runs/quickstart/export/zlab --prompts runs/quickstart/heldout.jsonl
"""

import json
from collections.abc import Sequence
from typing import Any
from urllib.request import Request, urlopen

from decoding_setup import load_setup, setup_parser

from dflash_lightning.decoding.decode import speculative_decode
from dflash_lightning.decoding.tau import pooled_tau
from dflash_lightning.decoding.ties import is_tie


def complete(server: str, prompt_ids: Sequence[int], max_new_tokens: int) -> dict[str, Any]:
    """The server's greedy answer to a prompt of tokens."""
    body = {"prompt": list(prompt_ids), "n_predict": max_new_tokens, "temperature": 0, "return_tokens": True}
    request = Request(f"{server}/completion", json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urlopen(request) as response:
        return json.load(response)


def main() -> None:
    parser = setup_parser(__doc__, limit=12, max_new_tokens=80, dtype="bfloat16")
    parser.add_argument("--server", default="http://127.0.0.1:8080")
    options = parser.parse_args()
    loaded = load_setup(options)
    target, stop_ids = loaded.target, loaded.limits["stop_ids"]
    runs, tokens, rounds, equal, ties = [], 0, 0, 0, 0
    for prompt in loaded.prompts:
        run = speculative_decode(target, loaded.drafter, prompt, **loaded.limits)
        answer = complete(options.server, prompt, options.max_new_tokens)
        timings = answer["timings"]
        # The first token belongs to no round; every round commits a token besides those that it accepted.
        tokens += timings["predicted_n"] - 1
        rounds += timings["predicted_n"] - 1 - timings["draft_n_accepted"]
        text = [token for token in run.token_ids if token not in stop_ids]
        same = text == [token for token in answer["tokens"] if token not in stop_ids]
        equal += same
        ties += not same and is_tie(target, prompt, text, answer["tokens"])
        runs.append(run)
    print(
        json.dumps(
            {
                "prompts": len(loaded.prompts),
                "dtype": options.dtype,
                "tau": pooled_tau(run.committed for run in runs),
                "tau_llama_cpp": tokens / rounds,
                "texts_equal": equal,
                "texts_that_part_at_a_tie": ties,
            }
        )
    )


if __name__ == "__main__":
    main()
