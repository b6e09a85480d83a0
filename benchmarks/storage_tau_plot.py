"""The curve of acceptance length against stored bytes, from the runs of storage_tau.py.

    python benchmarks/storage_tau_plot.py --runs storage_tau.jsonl --output storage_tau.png

Bytes are those of the quickstart's target, for which the runs were made.
"""

import argparse
import json
from collections import defaultdict
from pathlib import Path
from statistics import mean

from matplotlib.figure import Figure

from dflash_lightning.cache.packing import packed_width
from dflash_lightning.cache.storage import packed_bits

# SmolLM2-135M: five tapped layers of 576 channels. A token has an id of 4 bytes and a mask of 1 beside its features.
WIDTH, OTHER_BYTES = 5 * 576, 5


def bytes_per_token(storage: str) -> int:
    """What a token takes in a cache, the marker and metadata of its shard left out."""
    bits = packed_bits(storage)
    return OTHER_BYTES + (2 * WIDTH if bits is None else packed_width(WIDTH, bits))


def draw_curve(runs: list[dict]) -> Figure:
    """Every seed as a point, and a line through the means, for each number of steps."""
    taus = defaultdict(list)
    for run in runs:
        taus[run["steps"], run["storage"]].append(run["tau"])
    figure = Figure(figsize=(7, 3.8), dpi=90, layout="constrained")
    axes = figure.subplots()
    for number, steps in enumerate(sorted({steps for steps, _ in taus})):
        storages = sorted((storage for trained, storage in taus if trained == steps), key=bytes_per_token)
        shares = [100 * bytes_per_token(storage) / bytes_per_token("bfloat16") for storage in storages]
        means = [mean(taus[steps, storage]) for storage in storages]
        axes.plot(shares, means, color=f"C{number}", label=f"{steps:,} steps")
        for share, storage in zip(shares, storages, strict=True):
            axes.plot([share] * len(taus[steps, storage]), taus[steps, storage], "o", color=f"C{number}", alpha=0.5)
            axes.annotate(storage, (share, 1.01), xycoords=("data", "axes fraction"), ha="center", fontsize="small")
    axes.set(xscale="log", xlabel="bytes a token, % of bfloat16's", ylabel="acceptance length tau, decoded")
    axes.set_xticks([7, 13, 26, 51, 100], labels=["7", "13", "26", "51", "100"], minor=False)
    axes.minorticks_off()
    axes.legend(frameon=False)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def main() -> None:
    """Read the runs and write the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    draw_curve([json.loads(line) for line in arguments.runs.read_text().splitlines()]).savefig(arguments.output)


if __name__ == "__main__":
    main()
