"""The share of padding, by micro-batches in an optimizer step, on lengths like those of GSM8K with generated answers.

python benchmarks/padding.py --batch-tokens 16384
"""

import argparse

import numpy as np
from rich.console import Console
from rich.table import Table

from datamodules.plan import EpochPlanner, SampleSizes

SAMPLES = 7473
PROMPT_TOKENS, ANSWER_TOKENS = 75, 180


def gsm8k_like(block_size: int, num_anchors: int) -> SampleSizes:
    """Log-normal prompts and answers; 150 to 460 tokens for nine samples of ten."""
    random = np.random.default_rng(0)
    answers = random.lognormal(np.log(ANSWER_TOKENS), 0.45, SAMPLES).clip(20, 1000).astype(np.int64)
    prompts = random.lognormal(np.log(PROMPT_TOKENS), 0.3, SAMPLES).astype(np.int64)
    return SampleSizes(
        samples=np.arange(SAMPLES),
        lengths=prompts + answers,
        anchors=np.minimum(answers - 1, num_anchors),
        shards=np.zeros(SAMPLES, dtype=np.int64),
        block_size=block_size,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch-tokens", type=int, default=16384)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--num-anchors", type=int, default=512)
    arguments = parser.parse_args()
    sizes = gsm8k_like(arguments.block_size, arguments.num_anchors)
    table = Table("micro-batches in a step", "samples in one", "padding", "budget used", "samples left out")
    for batches_per_step in (1, 2, 4, 8, 16, 64):
        planner = EpochPlanner(sizes, batch_tokens=arguments.batch_tokens, batches_per_step=batches_per_step)
        batches = planner.batches(0)
        context = sum(len(batch) * sizes.lengths[batch].max() for batch in batches)
        blocks = sum(len(batch) * sizes.block_size * sizes.anchors[batch].max() for batch in batches)
        taken = np.concatenate(batches)
        table.add_row(
            str(batches_per_step),
            f"{len(taken) / len(batches):.1f}",
            f"{1 - sizes.lengths[taken].sum() / context:.1%}",
            f"{(context + blocks) / arguments.batch_tokens / len(batches):.0%}",
            str(SAMPLES - len(taken)),
        )
    Console().print(table)


if __name__ == "__main__":
    main()
