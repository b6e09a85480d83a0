"""Our decoder beside transformers' own DFlash generation and plain greedy decoding: same target, drafter and prompts.

`--drafter` is a folder of the format transformers, which both decoders read. All three decode each prompt in turn,
several times over, so that whatever else the machine does hits them alike. Then once more with a stopwatch in the
models' forwards: time to the first token, and what a round spends on drafting, on verifying and on the rest. The table
goes to stderr, a JSON line a decoder to stdout; ratios are medians of the repeats.

    python benchmarks/decode.py --target runs/quickstart/target --drafter runs/quickstart/export/transformers \\
        --prompts runs/quickstart/heldout.jsonl

On a busy machine, `OMP_NUM_THREADS=1` and `--clock cpu` count CPU seconds of this process instead of wall seconds.
"""

import json
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial, wraps
from statistics import median
from unittest import mock

import torch
from decoding_setup import load_setup, setup_parser
from rich.console import Console
from rich.table import Table
from transformers import AutoModel

from dflash_lightning.decoding.decode import plain_decode, speculative_decode
from dflash_lightning.decoding.tau import pooled_tau
from dflash_lightning.export.transformers_check import generate_with_transformers

CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
# Prompt -> new tokens, and tokens committed by each verify round.
Decoder = Callable[[Sequence[int]], tuple[list[int], list[int]]]


class Stopwatch:
    """Seconds spent in the models' forwards, by part; of nested calls the outermost counts.

    Attributes:
        parts: seconds in "draft" and "verify" since the last `reset`.
        prefilled: when the target's first forward since then returned.
    """

    def __init__(self, now: Callable[[], float]):
        self._now, self._inside = now, False
        self.reset()

    def reset(self) -> None:
        self.parts: dict[str, float] = defaultdict(float)
        self.prefilled: float | None = None

    def timed(self, method: Callable, part: str) -> Callable:
        """``method`` with its time counted; the first "verify" is the prefill and belongs to no round."""

        @wraps(method)  # transformers looks at the signature
        def call(*args, **kwargs):
            if self._inside:
                return method(*args, **kwargs)
            self._inside, start = True, self._now()
            result = method(*args, **kwargs)
            self._inside, end = False, self._now()
            if part == "verify" and self.prefilled is None:
                self.prefilled = end
            else:
                self.parts[part] += end - start
            return result

        return call


def measure_speed(decoders: dict[str, Decoder], prompts: list[tuple[int, ...]], now, repeats: int) -> dict[str, list]:
    """Tokens a second of each decoder in each repeat."""
    speeds: dict[str, list[float]] = {name: [] for name in decoders}
    for _ in range(repeats):
        seconds, tokens = defaultdict(float), defaultdict(int)
        for prompt in prompts:
            for name, decode in decoders.items():
                start = now()
                tokens[name] += len(decode(prompt)[0])
                seconds[name] += now() - start
        for name in decoders:
            speeds[name].append(tokens[name] / seconds[name])
    return speeds


def split_rounds(decoders: dict[str, Decoder], prompts: list[tuple[int, ...]], now, watched: list) -> dict[str, dict]:
    """Of each decoder: tau, texts equal to plain, milliseconds to the first token, and milliseconds a round by part.

    Args:
        watched: (object, name of its method, part) of every forward of a model.
    """
    watch = Stopwatch(now)
    found = {name: {"texts": [], "committed": [], "first_token": 0.0, "rounds": 0.0} for name in decoders}
    parts: dict[str, dict[str, float]] = {name: defaultdict(float) for name in decoders}
    with ExitStack() as stack:
        for owner, method, part in watched:
            stack.enter_context(mock.patch.object(owner, method, watch.timed(getattr(owner, method), part)))
        for prompt in prompts:
            for name, decode in decoders.items():
                watch.reset()
                start = now()
                text, committed = decode(prompt)
                end = now()
                found[name]["texts"].append(text)
                found[name]["committed"].append(committed)
                found[name]["first_token"] += watch.prefilled - start
                found[name]["rounds"] += end - watch.prefilled
                for part, seconds in watch.parts.items():
                    parts[name][part] += seconds
    results = {}
    for name, sums in found.items():
        # Plain decoding has a round a token.
        rounds = sum(map(len, sums["committed"])) or sum(len(text) - 1 for text in sums["texts"])
        rest = sums["rounds"] - sum(parts[name].values())
        results[name] = {
            "tau": pooled_tau(sums["committed"]),
            "first_token_ms": 1e3 * sums["first_token"] / len(prompts),
            "round_ms": 1e3 * sums["rounds"] / rounds,
            "draft_ms": 1e3 * parts[name]["draft"] / rounds,
            "verify_ms": 1e3 * parts[name]["verify"] / rounds,
            "rest_ms": 1e3 * rest / rounds,
            "rest_share": rest / sums["rounds"],
            "texts_equal_to_plain": sum(
                text == plain for text, plain in zip(sums["texts"], found["plain"]["texts"], strict=True)
            ),
        }
    return results


def print_table(lines: list[dict], clock: str) -> None:
    table = Table(title=f"{lines[0]['dtype']}, {lines[0]['prompts']} prompts, {clock} seconds")
    for column in ("decoder", "tokens/s", "x plain", "first token", "round", "draft", "verify", "rest", "tau"):
        table.add_column(column, justify="left" if column == "decoder" else "right")
    for line in lines:
        times = [f"{line[f'{part}_ms']:.1f} ms" for part in ("first_token", "round", "draft", "verify")]
        rest = f"{line['rest_ms']:.2f} ms ({line['rest_share']:.1%})"
        tau = "-" if line["tau"] is None else f"{line['tau']:.3f}"
        speed, ratio = f"{line['tokens_per_second']:.1f}", f"{line['over_plain']:.2f}"
        table.add_row(line["decoder"], speed, ratio, *times, rest, tau)
    Console(stderr=True, width=120).print(table)


def main() -> None:
    parser = setup_parser(__doc__, limit=6, max_new_tokens=64, dtype="float32")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--clock", choices=CLOCKS, default="wall")
    options = parser.parse_args()
    loaded = load_setup(options)
    device, target, drafter, prompts = loaded.device, loaded.target, loaded.drafter, loaded.prompts
    assistant = AutoModel.from_pretrained(options.drafter, dtype=loaded.dtype).eval().to(device)

    def ours(decode: Callable, prompt: Sequence[int]) -> tuple[list[int], list[int]]:
        run = decode(prompt_ids=prompt, **loaded.limits)
        return run.token_ids, run.committed

    decoders: dict[str, Decoder] = {
        "plain": partial(ours, partial(plain_decode, target)),
        "ours": partial(ours, partial(speculative_decode, target, drafter)),
        "transformers": lambda prompt: generate_with_transformers(target, assistant, prompt, **loaded.limits),
    }

    def now() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return CLOCKS[options.clock]()

    for decode in decoders.values():  # the first call of each is slower
        decode(prompts[0])
    speeds = measure_speed(decoders, prompts, now, options.repeats)
    watched = [
        (target, "forward", "verify"),
        *((module, "forward", "draft") for module in (target.get_input_embeddings(), target.get_output_embeddings())),
        *((drafter, method, "draft") for method in ("context_key_values", "forward")),
        (assistant, "forward", "draft"),
    ]
    rounds = split_rounds(decoders, prompts, now, watched)
    lines = []
    for name, split in rounds.items():
        over = {
            f"over_{other}": median(a / b for a, b in zip(speeds[name], speeds[other], strict=True))
            for other in ("plain", "transformers")
        }
        lines.append(
            {
                "decoder": name,
                "dtype": options.dtype,
                "device": device.type,
                "threads": torch.get_num_threads(),
                "clock": options.clock,
                "prompts": len(prompts),
                "tokens_per_second": median(speeds[name]),
                **over,
                **split,
            }
        )
    print_table(lines, options.clock)
    for line in lines:
        print(json.dumps(line))


if __name__ == "__main__":
    main()
