"""Words of messages."""


def counted(number: int, noun: str) -> str:
    """A number with its noun: "1 layer", "2 layers", "1,500 tokens"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
