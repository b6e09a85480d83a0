"""The quickstart's prompts: six families of templates whose answers a small target writes in a regular form.

They are made to show the road in minutes on two CPU cores. The drafter learns these forms and no others: the acceptance
length measured here says nothing about a general drafter.
"""

import random
from collections.abc import Callable

FAMILIES = ("times", "count", "even", "convert", "json", "legs")
TRAIN_PER_FAMILY = 124
HELD_OUT_PER_FAMILY = 3

NAMES = """Ada Ben Cora Dan Elif Finn Grace Hugo Iris Jonas Kira Liam Maya Nora Omar Paula Quinn Rosa Sam Tara
Uma Vera Wes Yara Zoe Anton Bella Carl Dora Emil Fiona Gustav Hanna Ivan Julia Karl Lena Marco Nina Oskar""".split()
CITIES = """Paris Rome Oslo Lima Cairo Delhi Tokyo Seoul Hanoi Quito Dakar Accra Sofia Berlin Madrid Lisbon Vienna
Prague Warsaw Dublin Athens Nairobi Havana Boston Denver Austin Tunis Riga Tallinn Zagreb""".split()


def _times(rng: random.Random) -> str:
    return f"Write the multiplication table of {rng.randint(2, 400)} from 1 to 10."


def _count(rng: random.Random) -> str:
    first = rng.randint(1, 900)
    return f"List all the numbers from {first} to {first + 12}, one per line."


def _even(rng: random.Random) -> str:
    first = 2 * rng.randint(1, 450)
    return f"List the even numbers between {first} and {first + 24}."


def _convert(rng: random.Random) -> str:
    return f"Convert {rng.randint(2, 990)} kilometers to meters. Show the steps."


def _json(rng: random.Random) -> str:
    name, city = rng.choice(NAMES), rng.choice(CITIES)
    return f"Write a JSON object for a person named {name}, age {rng.randint(18, 90)}, living in {city}."


def _legs(rng: random.Random) -> str:
    cows, hens, spiders = (rng.randint(2, 30) for _ in range(3))
    return f"How many legs do {cows} cows, {hens} hens and {spiders} spiders have in total? Show the steps."


_WRITERS: dict[str, Callable[[random.Random], str]] = dict(
    zip(FAMILIES, (_times, _count, _even, _convert, _json, _legs), strict=True)
)


def make_prompts(seed: int = 0) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """Training and held-out prompts: rows of id, family and prompt. No prompt occurs twice.

    Held-out families take turns, so that the first six rows have one of each.
    """
    train, held_out = [], []
    for family in FAMILIES:
        rng = random.Random(f"{family}-{seed}")
        prompts: dict[str, None] = {}
        while len(prompts) < TRAIN_PER_FAMILY + HELD_OUT_PER_FAMILY:
            prompts[_WRITERS[family](rng)] = None
        rows = [{"id": f"{family}-{i:03d}", "family": family, "prompt": p} for i, p in enumerate(prompts)]
        train += rows[:TRAIN_PER_FAMILY]
        held_out += rows[TRAIN_PER_FAMILY:]
    held_out.sort(key=lambda row: row["id"].split("-")[1])
    return train, held_out
