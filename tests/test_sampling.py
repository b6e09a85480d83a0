"""Sampled texts follow the target's distribution, whatever is proposed."""

import itertools
from collections import Counter

import pytest
import torch
from helpers import make_drafter
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.generation import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from dflash_lightning.decoding.decode import plain_decode, speculative_decode, speculative_decode_batch
from dflash_lightning.decoding.sampling import ArgmaxProposals, SampledProposals, Sampling, Verified, make_scheme
from dflash_lightning.errors import ConfigError

VOCABULARY, PROMPT, DRAWS, ROWS = 8, [5, 1, 6], 100_000, 10_000
SAMPLINGS = {"plain": Sampling(), "cut": Sampling(temperature=0.7, top_k=6, top_p=0.9)}


def warped(sampling: Sampling, logits: torch.Tensor) -> torch.Tensor:
    """Probabilities by transformers' own code."""
    scores = TemperatureLogitsWarper(sampling.temperature)(None, logits)
    if sampling.top_k is not None:
        scores = TopKLogitsWarper(sampling.top_k)(None, scores)
    if sampling.top_p < 1:
        scores = TopPLogitsWarper(sampling.top_p)(None, scores)
    return scores.softmax(dim=-1)


@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.7])
@pytest.mark.parametrize("top_k", [None, 1, 7, 500])
@pytest.mark.parametrize("top_p", [0.05, 0.6, 1.0])
def test_probabilities_are_those_of_transformers(temperature, top_k, top_p):
    sampling = Sampling(temperature, top_k, top_p)
    logits = 3 * torch.randn(40, 272, generator=torch.Generator().manual_seed(2))
    torch.testing.assert_close(sampling.probabilities(logits), warped(sampling, logits))


@pytest.fixture(scope="module")
def target() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        **{"vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 6},
        **{"num_attention_heads": 2, "num_key_value_heads": 1, "initializer_range": 0.5},
    )
    return LlamaForCausalLM(config).eval().requires_grad_(False)


@pytest.fixture(scope="module")
def drafter(target):
    # A temper of its own: neither the target's nor a uniform one.
    return make_drafter(target, block_size=4, scale=8.0, seed=1)


@torch.no_grad()
def exact_distribution(target, sampling: Sampling) -> torch.Tensor:
    """[V, V, V] probability of the first three tokens, by one forward of every prefix."""
    joint = torch.ones(VOCABULARY, VOCABULARY, VOCABULARY, dtype=torch.float64)
    for prefix in itertools.chain.from_iterable(
        itertools.product(range(VOCABULARY), repeat=length) for length in range(3)
    ):
        logits = target(torch.tensor([[*PROMPT, *prefix]])).logits[:, -1]
        following = warped(sampling, logits)[0].double()
        joint[prefix] *= following[(slice(None),) + (None,) * (2 - len(prefix))]
    return joint


def misfit(target, drafter, scheme, expected: torch.Tensor) -> float:
    """How many standard deviations the chi-square of 100,000 draws lies above what chance gives."""
    texts = Counter()
    for _ in range(DRAWS // ROWS):
        runs = speculative_decode_batch(target, drafter, [PROMPT] * ROWS, max_new_tokens=3, stop_ids=(), scheme=scheme)
        texts.update(tuple(run.token_ids) for run in runs)
    counts = torch.zeros_like(expected)
    for text, count in texts.items():
        counts[text] = count
    assert counts.sum() == DRAWS
    expected = expected * DRAWS
    assert counts[expected == 0].sum() == 0
    rare = expected < 5
    pairs = [(counts[~rare], expected[~rare]), (counts[rare].sum()[None], expected[rare].sum().clamp(min=1e-9)[None])]
    seen, hoped = (torch.cat(parts) for parts in zip(*pairs, strict=True))
    degrees = len(seen) - 1
    statistic = float(((seen - hoped) ** 2 / hoped).sum())
    return (statistic - degrees) / (2 * degrees) ** 0.5


@pytest.mark.slow
@pytest.mark.parametrize("proposals", ["argmax", "sampled"])
@pytest.mark.parametrize("name", SAMPLINGS)
def test_sampled_texts_follow_the_targets_distribution(target, drafter, proposals, name):
    sampling = SAMPLINGS[name]
    scheme = make_scheme(**vars(sampling), proposals=proposals, seed=3)
    assert abs(misfit(target, drafter, scheme, exact_distribution(target, sampling))) < 4


@pytest.mark.slow
def test_the_measure_sees_a_scheme_that_accepts_too_much(target, drafter):
    class Credulous(SampledProposals):
        def verify(self, proposals, logits):
            tokens, accepted = super().verify(proposals, logits)
            takes_first = (accepted == 0) & (torch.rand(len(accepted), generator=self.generator) < 0.1)
            return Verified(
                torch.where(takes_first[:, None], torch.nn.functional.pad(proposals, (0, 1)), tokens), accepted
            )

    sampling = SAMPLINGS["plain"]
    scheme = Credulous(sampling, torch.Generator().manual_seed(3))
    assert misfit(target, drafter, scheme, exact_distribution(target, sampling)) > 10


def test_both_schemes_accept_and_reject(target, drafter):
    for kind in (ArgmaxProposals, SampledProposals):
        run = speculative_decode(
            target, drafter, PROMPT, max_new_tokens=200, stop_ids=(), scheme=kind(Sampling(), torch.Generator())
        )
        assert {1, 2} <= set(run.committed) <= {1, 2, 3, 4}


def test_a_seed_gives_one_text_and_another_seed_another(target, drafter):
    def text(seed, proposals):
        scheme = make_scheme(temperature=1.0, proposals=proposals, seed=seed)
        limits = {"max_new_tokens": 30, "stop_ids": ()}
        return speculative_decode(target, drafter, PROMPT, scheme=scheme, **limits).token_ids

    for proposals in ("argmax", "sampled"):
        assert text(1, proposals) == text(1, proposals) != text(2, proposals)


@pytest.mark.parametrize("proposals", ["argmax", "sampled"])
def test_sampled_texts_end_at_stop_tokens_and_at_the_limit(target, drafter, proposals):
    """The same random numbers give the same text, up to where it ends."""

    def text(**limits):
        scheme = make_scheme(temperature=1.0, proposals=proposals, seed=5)
        return speculative_decode(target, drafter, PROMPT, scheme=scheme, **limits).token_ids

    whole = text(max_new_tokens=60, stop_ids=())
    assert len(whole) == 60
    for count in range(1, 12):
        assert text(max_new_tokens=count, stop_ids=()) == whole[:count]
    for stop_ids in ((2,), (7,), (3, 4)):
        end = min(whole.index(token) for token in stop_ids if token in whole)
        assert text(max_new_tokens=60, stop_ids=stop_ids) == whole[: end + 1]


def test_a_cold_temperature_is_greedy(target, drafter):
    limits = {"max_new_tokens": 30, "stop_ids": ()}
    expected = plain_decode(target, PROMPT, **limits).token_ids
    for proposals in ("argmax", "sampled"):
        scheme = make_scheme(temperature=1e-6, proposals=proposals)
        assert plain_decode(target, PROMPT, scheme=scheme, **limits).token_ids == expected
        assert speculative_decode(target, drafter, PROMPT, scheme=scheme, **limits).token_ids == expected


def test_a_perfect_drafter_is_always_accepted():
    """With q equal to p nothing is rejected."""
    scheme = make_scheme(temperature=1.0, proposals="sampled")
    logits = torch.randn(50, 5, VOCABULARY)
    verified = scheme.verify(scheme.propose(logits[:, :4]), logits)
    assert verified.accepted.tolist() == [4] * 50


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"temperature": 1e-40}, "temperature is 1e-40; expected 0"),
        ({"top_k": 0}, "top_k is 0"),
        ({"top_p": 0.0}, "top_p is 0.0"),
    ],
)
def test_settings_out_of_range_are_refused(wrong, message):
    with pytest.raises(ConfigError, match=message):
        Sampling(**wrong)


def test_settings_that_greedy_decoding_would_ignore_are_refused():
    for ignored, named in (
        ({"top_p": 0.9}, r"top_p 0\.9"),
        ({"top_k": 5}, "top_k 5"),
        ({"proposals": "argmax"}, "s arg"),
    ):
        with pytest.raises(ConfigError, match=f"{named}.* would have no effect"):
            make_scheme(**ignored)
