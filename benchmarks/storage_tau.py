"""What fewer bits a feature cost: acceptance length by real decoding after training on packed features.

Takes the quickstart's target and settings, and a bfloat16 cache of its texts. For every storage, seed and number of
steps it packs the training features shard by shard, trains the quickstart's drafter on what unpacking gives back, and
decodes held-out prompts with the target's own exact features. One JSON line a run goes to --output; runs that are
already there are skipped, so that it can be stopped and go on.

By default the loss is a sampled softmax: every token of the training texts, and --negatives others drawn anew at each
step, which stand for all others. That makes a step several times cheaper, and is the same for every storage; decoding
takes the whole vocabulary. --negatives 0 trains on the whole vocabulary, as the quickstart does.

    dflash-lightning capture --target runs/quickstart/target --data runs/quickstart/data/train \\
        --cache runs/plain --storage bfloat16
    python benchmarks/storage_tau.py --target runs/quickstart/target --cache runs/plain --output storage_tau.jsonl
"""

import argparse
import dataclasses
import itertools
import json
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import embedding

from datamodules.loader import MicroBatchDataset
from datamodules.plan import EpochPlanner, SampleSizes
from datamodules.sampler import StepSampler
from dflash_lightning.blocks import Blocks, build_blocks, positions_in_document
from dflash_lightning.cache import CacheManifest, FeatureCache, Sample, open_store
from dflash_lightning.cache.packing import pack, unpack
from dflash_lightning.cache.storage import STORAGES, Storage, packed_bits
from dflash_lightning.config import DrafterConfig, DrafterSettings
from dflash_lightning.decoding.decode import speculative_decode
from dflash_lightning.decoding.tau import pooled_tau, tau_interval
from dflash_lightning.drafter import Drafter
from dflash_lightning.evaluation.prompt_results import Prompt, load_prompts
from dflash_lightning.progress import say, track
from dflash_lightning.quickstart.prompts import make_prompts
from dflash_lightning.target import load_target, load_tokenizer, stop_token_ids, target_text_config
from dflash_lightning.training.losses import LossSettings, SlotResults, score_slots, weighted_loss
from dflash_lightning.training.module import OptimizerSettings
from dflash_lightning.visibility import attention_mask

BATCH_TOKENS, NUM_ANCHORS, MAX_NEW_TOKENS = 1400, 24, 80
LOSS, OPTIMIZER = LossSettings(weighting="dpace"), OptimizerSettings(lr=2e-3)


class RestoredCache(FeatureCache):
    """A bfloat16 cache whose features have been through `pack` and `unpack`, a shard at a time."""

    def __init__(self, path: Path, storage: Storage):
        super().__init__(path)
        if self.manifest.storage != "bfloat16":
            raise SystemExit(f"{path} stores features in {self.manifest.storage}; this needs a bfloat16 cache")
        self._restored = {}
        bits = packed_bits(storage)
        for shard in np.unique(self.shards):
            members = np.flatnonzero(self.shards == shard)
            samples = [super(RestoredCache, self).read(i) for i in members.tolist()]
            if bits is not None:
                features = torch.cat([sample.features for sample in samples])
                packed = pack(features, bits, len(self.manifest.target_layer_ids))
                for sample, part in zip(samples, unpack(packed).split(self.lengths[members].tolist()), strict=True):
                    sample.features = part
            self._restored |= zip(members.tolist(), samples, strict=True)

    def read(self, index: int) -> Sample:
        return self._restored[index]


class SampledHead:
    """Rows of the head that stand for all of them: the tokens of the texts, and a fresh sample of the others.

    A drawn token stands for all that could have been drawn, so its logit is raised by the logarithm of their ratio; a
    column of biases does it.
    """

    def __init__(self, head: Tensor, cache: FeatureCache, negatives: int, seed: int):
        self.head, self.negatives = head, negatives
        used = torch.cat([torch.from_numpy(cache.read(i).input_ids) for i in range(len(cache))]).unique().long()
        self.others = torch.ones(len(head), dtype=torch.bool).scatter(0, used, False).nonzero()[:, 0]
        self.place = torch.zeros(len(head), dtype=torch.long).scatter(0, used, torch.arange(len(used)))
        drawn_stand_for = torch.full((negatives,), len(self.others) / max(1, negatives))
        self.bias = torch.cat((torch.zeros(len(used)), drawn_stand_for.log()))
        self.used, self.generator = used, torch.Generator().manual_seed(seed)

    def score(self, hidden: Tensor, blocks: Blocks) -> SlotResults:
        if not self.negatives:
            return score_slots(hidden, self.head, blocks)
        drawn = self.others[torch.randint(len(self.others), (self.negatives,), generator=self.generator)]
        rows = torch.cat((self.head[torch.cat((self.used, drawn))], self.bias[:, None].to(hidden.dtype)), dim=1)
        with_one = torch.nn.functional.pad(hidden, (0, 1), value=1.0)
        return score_slots(with_one, rows, dataclasses.replace(blocks, labels=self.place[blocks.labels]))


def train(
    cache: FeatureCache, config: DrafterConfig, table: Tensor, *, steps: int, seed: int, negatives: int
) -> Drafter:
    """The quickstart's run without Lightning: bfloat16 weights with float32 masters, AdamW, clipping at 1."""
    torch.manual_seed(seed)
    drafter = Drafter(config)
    masters = [p.detach().clone().requires_grad_() for p in drafter.parameters()]
    drafter = drafter.to(torch.bfloat16)
    optimizer = torch.optim.AdamW(masters, lr=OPTIMIZER.lr, weight_decay=0, fused=True)
    sizes = SampleSizes(
        samples=np.arange(len(cache)),
        lengths=cache.lengths,
        anchors=cache.anchor_candidates.clip(max=NUM_ANCHORS),
        shards=cache.shards,
        block_size=config.block_size,
    )
    planner = EpochPlanner(sizes, batch_tokens=BATCH_TOKENS, batches_per_step=1, seed=seed)
    sampler = StepSampler(planner, int)  # a sample's place is its number here
    dataset = MicroBatchDataset(cache, num_anchors=NUM_ANCHORS, seed=seed)
    head = SampledHead(table, cache, negatives, seed)
    step = 0
    with track(steps, "training", "steps") as progress:
        while step < steps:
            sampler.set_epoch(step // len(sampler))
            for plan in itertools.islice(sampler, steps - step):
                batch = dataset[plan]
                blocks = build_blocks(
                    **{k: batch[k] for k in ("input_ids", "loss_mask", "document_ids", "anchors", "valid")},
                    block_size=config.block_size,
                    mask_token_id=config.mask_token_id,
                )
                context = drafter.context_key_values(batch["features"], positions_in_document(batch["document_ids"]))
                hidden = drafter(
                    embedding(blocks.input_ids.flatten(1), table),
                    blocks.positions.flatten(1),
                    context,
                    attention_mask(blocks.layout),
                )
                (weighted_loss(head.score(hidden, blocks), LOSS) / batch["anchors_in_step"]).backward()
                for master, weight in zip(masters, drafter.parameters(), strict=True):
                    master.grad, weight.grad = weight.grad.float(), None
                torch.nn.utils.clip_grad_norm_(masters, 1.0)
                for group in optimizer.param_groups:
                    group["lr"] = OPTIMIZER.lr * OPTIMIZER.scale(step, steps)
                optimizer.step()
                with torch.no_grad():
                    for master, weight in zip(masters, drafter.parameters(), strict=True):
                        weight.copy_(master)
                step += 1
                progress.advance(1)
    return drafter.eval()


def held_out_prompts(tokenizer, count: int) -> list[Prompt]:
    """Prompts of the quickstart's families that no training text answers, the families in turn."""
    seen = {row["prompt"] for row in make_prompts(0)[0]}
    rows = [row for row in make_prompts(1)[0] if row["prompt"] not in seen]
    rows.sort(key=lambda row: row["id"].split("-")[1])
    with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows[:count])
        file.flush()
        return load_prompts(file.name, tokenizer)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True, help="the quickstart's target")
    parser.add_argument("--cache", type=Path, required=True, help="a bfloat16 cache of the quickstart's texts")
    parser.add_argument("--output", type=Path, required=True, help="JSON lines of the runs, appended to")
    parser.add_argument("--storages", nargs="+", default=list(STORAGES), choices=STORAGES)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", nargs="+", type=int, default=[480])
    parser.add_argument("--prompts", type=int, default=24, help="held-out prompts that are decoded")
    parser.add_argument("--negatives", type=int, default=2048, help="tokens drawn for the loss; 0: all")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)

    tokenizer = load_tokenizer(options.target)
    target = load_target(options.target, dtype=torch.bfloat16)
    prompts = held_out_prompts(tokenizer, options.prompts)
    stop_ids = stop_token_ids(target, tokenizer)
    layer_ids = list(CacheManifest.load(open_store(options.cache)).target_layer_ids)
    settings = DrafterSettings(num_layers=2, block_size=8, target_layer_ids=layer_ids, mask_token_id=3)
    config = DrafterConfig.from_target(settings, target_text_config(options.target), mask_token_id=3)

    done = []
    if options.output.exists():
        done = [json.loads(line) for line in options.output.read_text().splitlines()]
    for steps, seed, storage in itertools.product(options.steps, options.seeds, options.storages):
        key = {"storage": storage, "seed": seed, "steps": steps, "negatives": options.negatives}
        if any(key.items() <= run.items() for run in done):
            continue
        started = time.perf_counter()
        cache = RestoredCache(options.cache, storage)
        table = target.get_input_embeddings().weight.detach()
        drafter = train(cache, config, table, steps=steps, seed=seed, negatives=options.negatives)
        committed = [
            speculative_decode(
                target, drafter, prompt.token_ids, max_new_tokens=MAX_NEW_TOKENS, stop_ids=stop_ids
            ).committed
            for prompt in prompts
        ]
        low, high = tau_interval(committed)
        result = {
            **key,
            "tau": pooled_tau(committed),
            "tau_low": low,
            "tau_high": high,
            "rounds": sum(map(len, committed)),
            "prompts": len(prompts),
            "seconds": time.perf_counter() - started,
        }
        say(json.dumps(result))
        with options.output.open("a") as file:
            file.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
