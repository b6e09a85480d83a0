"""What target and drafter keep of the texts so far while decoding: keys and values, one row a text."""

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from dflash_lightning.drafter import Drafter, KeyValue
from dflash_lightning.errors import ConfigError
from dflash_lightning.features import input_device


class Context:
    """The caches of target and drafter, whose rows advance each by its own acceptance.

    A round appends to all rows as many positions as the luckiest row has committed. What another row didn't commit is a
    hole: masked from then on, and squeezed out once the holes make up half. Rows of unequal prompts begin with holes. A
    single row never has any.

    Attributes:
        valid: [R, L] False in holes.
    """

    def __init__(self, target: PreTrainedModel, drafter: Drafter, prompts: Sequence[Sequence[int]]):
        """
        Raises:
            ConfigError: several prompts for a target whose layers see a sliding window, which would count the holes.
        """
        self.target, self.drafter = target, drafter
        layer_types = getattr(target.config.get_text_config(), "layer_types", None) or ["full_attention"]
        if len(prompts) > 1 and set(layer_types) != {"full_attention"}:
            raise ConfigError(
                f"the target's layers are {', '.join(sorted(set(layer_types)))}; a batch of prompts needs "
                "full_attention in all of them. Decode one prompt at a time."
            )
        # Known on the host too: reading them from a GPU would wait for it.
        self._lengths = [len(prompt) for prompt in prompts]
        width = max(self._lengths)
        self.prompts = torch.tensor([[0] * (width - len(prompt)) + list(prompt) for prompt in prompts])
        self.prompts = self.prompts.to(drafter.device)
        self.valid = torch.arange(width) >= width - torch.tensor(self._lengths)[:, None]
        self.valid = self.valid.to(drafter.device)
        self._has_holes = min(self._lengths) < width
        self._target_cache = DynamicCache(config=target.config)
        self._target_cache.activate_past_recording()
        self._drafter_cache: list[KeyValue] | None = None

    @property
    def lengths(self) -> Tensor:
        """[R] tokens of each row."""
        return self.valid.sum(dim=1)

    def prefill(self) -> Tensor:
        """The target's logits [R, V] after each prompt."""
        positions = (self.valid.cumsum(dim=1) - 1).clamp(min=0)
        # An index rather than the number 1, whose slice isn't contiguous: matmul would copy the head once a row.
        last = torch.tensor([self.prompts.shape[1] - 1], device=self.prompts.device)
        return self._run_target(self.prompts, positions, self.valid, logits_to_keep=last)[:, -1]

    def verify(self, block: Tensor) -> Tensor:
        """The target's logits [R, B, V] at the tokens ``block`` [R, B], which follow the context."""
        return self._run_target(block, self._next_positions(block.shape[1]), self._visible(block.shape[1]))

    def _run_target(self, input_ids: Tensor, positions: Tensor, visible: Tensor, **options) -> Tensor:
        mask = visible.long() if self._has_holes else None
        device = input_device(self.target)
        output = self.target(
            input_ids.to(device),
            attention_mask=mask if mask is None else mask.to(device),
            position_ids=positions.to(device),
            cache=self._target_cache,
            use_cache=True,
            **options,
        )
        return output.logits.to(self.drafter.device)

    def _next_positions(self, count: int) -> Tensor:
        return self.lengths[:, None] + torch.arange(count, device=self.valid.device)

    def _visible(self, count: int) -> Tensor:
        """[R, L + count] the context and ``count`` tokens after it."""
        return torch.nn.functional.pad(self.valid, (0, count), value=True)

    def extend_drafter(self, features: Tensor) -> None:
        """Give the drafter the ``features`` [R, n, K*H] of the last n positions; a hole's may be anything."""
        count = features.shape[1]
        positions = (self.valid.cumsum(dim=1)[:, -count:] - 1).clamp(min=0)
        new = self.drafter.context_key_values(features, positions)
        if self._drafter_cache is None:
            self._drafter_cache = new
        else:
            self._drafter_cache = [
                (torch.cat((key, new_key), dim=2), torch.cat((value, new_value), dim=2))
                for (key, value), (new_key, new_value) in zip(self._drafter_cache, new, strict=True)
            ]

    def draft(self, anchors: Tensor) -> Tensor:
        """The drafter's logits [R, B - 1, V] for the tokens after ``anchors`` [R], which follow the context."""
        config = self.drafter.config
        block = anchors.new_full((len(anchors), config.block_size), config.mask_token_id)
        block[:, 0] = anchors
        embeddings = self.target.get_input_embeddings()(block.to(input_device(self.target))).to(self.drafter.device)
        mask = self._visible(config.block_size)[:, None, None] if self._has_holes else None
        hidden = self.drafter(embeddings, self._next_positions(config.block_size), self._drafter_cache, mask)
        return self.target.get_output_embeddings()(hidden[:, 1:]).to(self.drafter.device)

    def keep(self, counts: Sequence[int], block_size: int) -> None:
        """Of the block that was verified last, keep the first ``counts`` [R] tokens of each row."""
        most = max(counts)
        self._target_cache.crop(most - block_size)
        self._lengths = [length + count for length, count in zip(self._lengths, counts, strict=True)]
        self.valid = self._visible(most)
        if min(counts) < most:
            self._has_holes = True
            kept = torch.arange(most) < torch.tensor(counts)[:, None]
            self.valid[:, -most:] = kept.to(self.valid.device)

    def select(self, rows: Sequence[int]) -> None:
        """Go on with these rows."""
        index = torch.tensor(rows, device=self.valid.device)
        self._target_cache.batch_select_indices(index)
        self.valid = self.valid[index]
        self._lengths = [self._lengths[row] for row in rows]
        self._drafter_cache = [(key[index], value[index]) for key, value in self._drafter_cache or []] or None

    def squeeze(self) -> None:
        """Take the holes out where they make up half; call it when target and drafter have the same context."""
        if not self._has_holes:
            return
        longest, shortest = max(self._lengths), min(self._lengths)
        if 2 * longest > self.valid.shape[1]:
            return
        # Holes first, then the tokens in their order: the last `longest` columns hold all tokens.
        index = self.valid.to(torch.uint8).argsort(dim=1, stable=True)[:, -longest:]
        self.valid = self.valid.gather(1, index)
        self._has_holes = shortest < longest

        def squeezed(states: Tensor) -> Tensor:
            return states.gather(
                2, index.to(states.device)[:, None, :, None].expand(-1, states.shape[1], -1, states.shape[3])
            )

        for layer in self._target_cache.layers:
            layer.keys, layer.values = squeezed(layer.keys), squeezed(layer.values)
        self._drafter_cache = [(squeezed(key), squeezed(value)) for key, value in self._drafter_cache]
