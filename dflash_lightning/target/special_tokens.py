"""Which token ids end a text, and which one stands for a slot that the drafter must fill."""

from collections.abc import Iterable

from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from dflash_lightning.errors import ConfigError

# How many ids a message names.
NAMED = 3


def stop_token_ids(source: PreTrainedModel | GenerationConfig, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """The ids that end an answer: the generation defaults' eos ids and the tokenizer's, ascending, each once."""
    generation = source if isinstance(source, GenerationConfig) else source.generation_config
    eos = generation.eos_token_id
    listed = [eos] if isinstance(eos, int) else list(eos or ())
    return tuple(sorted({*listed, tokenizer.eos_token_id} - {None}))


def resolve_mask_token_id(
    explicit: int | None,
    tokenizer: PreTrainedTokenizerBase,
    embedding_rows: int,
    stop_ids: Iterable[int] = (),
) -> int:
    """Choose or check the id of the mask token; to be called at every load, not only at the first.

    Args:
        explicit: The id that was asked for. None takes the tokenizer's mask token, or else the first row of the
            embedding table that no token uses.
        tokenizer: The target's tokenizer.
        embedding_rows: Rows of the target's embedding table (it may have more than the tokenizer has tokens).
        stop_ids: Ids that end an answer, besides the tokenizer's eos.

    Raises:
        ConfigError: The id is outside the table, or is pad, eos, bos or a stop id: such a token has a meaning of its
            own, and a drafter that learns it as "empty slot" confuses the two.
    """
    forbidden = dict.fromkeys(stop_ids, "a stop token")
    for role in ("pad", "bos", "eos"):
        if (token := getattr(tokenizer, f"{role}_token_id")) is not None:
            forbidden[token] = f"the {role} token"
    first_unused = max(tokenizer.get_vocab().values()) + 1
    if explicit is not None:
        mask, origin = explicit, "asked for"
    elif tokenizer.mask_token_id is not None:
        mask, origin = tokenizer.mask_token_id, "the tokenizer's mask token"
    elif first_unused < embedding_rows:
        mask, origin = first_unused, "the first unused row of the embedding table"
    else:
        raise ConfigError(
            f"No mask token: the tokenizer has none, and its {first_unused} ids use all {embedding_rows} rows of the "
            f"embedding table. {_advice(tokenizer, embedding_rows, forbidden)}"
        )
    if not 0 <= mask < embedding_rows:
        problem = f"outside the embedding table of {embedding_rows} rows"
    elif mask in forbidden:
        problem = f"{forbidden[mask]} ({tokenizer.convert_ids_to_tokens(mask)!r})"
    else:
        return mask
    raise ConfigError(f"Mask token id {mask} ({origin}) is {problem}. {_advice(tokenizer, embedding_rows, forbidden)}")


def _advice(tokenizer: PreTrainedTokenizerBase, embedding_rows: int, forbidden: dict[int, str]) -> str:
    fitting = fitting_mask_tokens(tokenizer, embedding_rows, forbidden)
    examples = f", for example {', '.join(fitting)}" if fitting else ""
    return (
        f"Set model.drafter.mask_token_id to an id from 0 to {embedding_rows - 1} that is no pad, bos, eos or stop "
        f"token and that texts don't use{examples}."
    )


def fitting_mask_tokens(
    tokenizer: PreTrainedTokenizerBase, embedding_rows: int, forbidden: Iterable[int] = ()
) -> list[str]:
    """Ids that would do as mask tokens, each with its token: special ones that no chat has, else the rarest.

    Args:
        tokenizer: The target's tokenizer.
        embedding_rows: Rows of the target's embedding table.
        forbidden: Ids that have a meaning of their own.
    """
    taken = {*forbidden, tokenizer.unk_token_id}
    added, template = tokenizer.added_tokens_decoder, str(tokenizer.chat_template)
    spare = [id for id, token in sorted(added.items()) if token.special and token.content not in template]
    # Tokenizers are trained from frequent to rare.
    rarest = sorted(tokenizer.get_vocab().values(), reverse=True)
    fitting = [
        id for id in (*spare, *(id for id in rarest if id not in added)) if id not in taken and id < embedding_rows
    ]
    return [f"{id} ({tokenizer.convert_ids_to_tokens(id)})" for id in fitting[:NAMED]]
