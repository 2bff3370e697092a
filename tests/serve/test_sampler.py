"""Greedy, temperature and top-p against an independent computation in numpy, and seeds."""

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from quantkit.serve.sampler import NUCLEUS_GUESS, Draw, Limits, sample, sample_probabilities


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def numpy_softmax(logits: Tensor, temperature: float) -> np.ndarray:
    scores = logits.double().numpy() / temperature
    probabilities = np.exp(scores - scores.max())
    return probabilities / probabilities.sum()


def numpy_nucleus(probabilities: np.ndarray, top_p: float) -> dict[int, float]:
    """Token -> probability after renormalizing the nucleus, written out from the definition."""
    kept: dict[int, float] = {}
    for token in sorted(range(len(probabilities)), key=lambda index: -probabilities[index]):
        kept[token] = float(probabilities[token])
        if sum(kept.values()) >= top_p:
            break
    total = sum(kept.values())
    return {token: probability / total for token, probability in kept.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_greedy_takes_the_largest_and_the_first_of_equals(dtype: torch.dtype) -> None:
    logits = torch.tensor([[0.0, 3, 1], [5, 5, 1], [-2, -1, -1]]).to(dtype)
    assert sample(logits, [Draw(0.0, 1.0, None)] * 3) == [1, 0, 1]


@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.7, 0.9), (1.5, 0.5), (0.3, 0.999), (2.0, 0.05)])
@pytest.mark.parametrize("vocab", [40, 3 * NUCLEUS_GUESS])
def test_frequencies_are_those_of_the_nucleus(temperature: float, top_p: float, vocab: int) -> None:
    logits = torch.randn(vocab, generator=generator(1)) * 2
    wanted = numpy_nucleus(numpy_softmax(logits, temperature), top_p)
    draws = 4000
    rows = logits.repeat(draws, 1)
    shared = generator(2)
    tokens = sample(rows, [Draw(temperature, top_p, shared)] * draws)
    counts = np.bincount(np.array(tokens), minlength=vocab)
    assert set(np.nonzero(counts)[0]) <= set(wanted)
    expected = np.array([wanted[token] * draws for token in wanted])
    observed = np.array([counts[token] for token in wanted])
    large = expected >= 5  # the rest is pooled, as the chi-square test needs
    if not large.all():
        expected = np.append(expected[large], expected[~large].sum())
        observed = np.append(observed[large], observed[~large].sum())
    if len(expected) > 1:
        assert stats.chisquare(observed, expected).pvalue > 1e-4
    else:
        assert observed.sum() == draws


@pytest.mark.parametrize("top_p", [0.1, 0.35, 0.7, 0.95, 0.9999])
@pytest.mark.parametrize("spread", [0.02, 1.0, 4.0])
def test_each_uniform_number_gives_the_token_of_the_definition(top_p: float, spread: float) -> None:
    """Flat distributions need more than the guessed nucleus, peaked ones one token."""
    places = torch.randperm(1200, generator=generator(3))
    probabilities = torch.linspace(-3 * spread, 3 * spread, 1200)[places].softmax(-1)
    assert len(probabilities.unique()) == 1200  # no ties, whose order nobody defines
    wanted = numpy_nucleus(probabilities.double().numpy(), top_p)
    edges = np.cumsum(list(wanted.values()))
    uniform = torch.rand(200, generator=generator(4), dtype=torch.float64)
    tokens = sample_probabilities(probabilities.repeat(200, 1), Limits.of([Draw(1.0, top_p, None)] * 200), uniform)
    for token, number in zip(tokens.tolist(), uniform.tolist(), strict=True):
        index = list(wanted).index(token)  # in the nucleus
        low = 0.0 if index == 0 else edges[index - 1]
        assert low - 1e-9 <= number <= edges[index] + 1e-9


def test_the_ends_of_the_uniform_range() -> None:
    probabilities = torch.tensor([[0.0, 0.25, 0.75, 0.0]])
    for top_p in (1.0, 0.999999):
        for number, wanted in ((0.0, {1, 2}), (1 - 2**-53, {1, 2})):
            one = torch.tensor([number], dtype=torch.float64)
            token = sample_probabilities(probabilities, Limits.of([Draw(1.0, top_p, None)]), one)
            assert int(token) in wanted  # never a token of probability 0


def test_a_row_depends_on_its_own_logits_and_generator_only() -> None:
    logits = torch.randn(6, 2000, generator=generator(5))
    settings = [(0.8, 0.9), (0.0, 1.0), (1.0, 1.0), (1.2, 0.3), (0.5, 0.99), (3.0, 0.97)]

    def draws() -> list[Draw]:
        return [Draw(temperature, top_p, generator(row)) for row, (temperature, top_p) in enumerate(settings)]

    together = sample(logits, draws())
    alone = [sample(logits[row : row + 1], draws()[row : row + 1])[0] for row in range(6)]
    backwards = sample(logits.flip(0), draws()[::-1])[::-1]
    assert together == alone == backwards


def test_one_number_is_drawn_for_each_token() -> None:
    """So that a preempted request, which computes its tokens anew, goes on with the right numbers."""
    used = generator(6)
    for row in range(5):
        sample(torch.randn(1, 50, generator=generator(row)), [Draw(1.0, 0.9, used)])
    counted = generator(6)
    torch.rand(5, generator=counted, dtype=torch.float64)
    assert torch.equal(used.get_state(), counted.get_state())


def test_rows_that_are_no_distribution_are_none_and_disturb_nobody() -> None:
    logits = torch.randn(4, 30, generator=generator(7))
    wanted = sample(logits, [Draw(1.0, 0.9, generator(1)), *[Draw(0.0, 1.0, None)] * 3])
    logits[1, 3] = float("nan")
    logits[2, 3] = float("inf")
    logits[0, 5] = float("-inf")  # a token that cannot come is fine
    logits[3] = float("-inf")
    found = sample(logits, [Draw(1.0, 0.9, generator(1)), Draw(1.0, 0.9, generator(2)), *[Draw(0.0, 1.0, None)] * 2])
    assert found[1:] == [None, None, None]
    assert found[0] is not None
    assert wanted[0] is not None


def test_a_tiny_temperature_is_nearly_greedy_and_not_nan() -> None:
    logits = torch.tensor([[1.0, 2.0, 1.5]])
    assert sample(logits, [Draw(1e-30, 1.0, generator(0))]) == [1]


def numpy_filtered(probabilities: np.ndarray, top_k: int, top_p: float, min_p: float) -> dict[int, float]:
    """Token -> probability, written out: first min_p, then top_k, then the nucleus of what is left."""
    order = sorted(range(len(probabilities)), key=lambda index: -probabilities[index])
    kept = [token for token in order if probabilities[token] >= min_p * probabilities.max()]
    kept = kept[: top_k or None]
    total = sum(probabilities[token] for token in kept)
    return numpy_nucleus(np.array([probabilities[t] / total if t in kept else 0.0 for t in range(len(order))]), top_p)


@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"),
    [(1, 1.0, 0.0), (7, 1.0, 0.0), (900, 1.0, 0.0), (0, 1.0, 0.2), (0, 1.0, 0.001), (20, 0.8, 0.0), (30, 0.9, 0.15),
     (5000, 0.5, 0.0), (0, 0.97, 0.002), (800, 0.999, 0.0001)],
)  # fmt: skip
@pytest.mark.parametrize("spread", [0.1, 1.0, 4.0])
def test_top_k_and_min_p_give_the_token_of_the_definition(
    top_k: int, top_p: float, min_p: float, spread: float
) -> None:
    places = torch.randperm(1200, generator=generator(3))
    probabilities = torch.linspace(-3 * spread, 3 * spread, 1200)[places].softmax(-1)
    wanted = numpy_filtered(probabilities.double().numpy(), top_k, top_p, min_p)
    edges = np.cumsum(list(wanted.values()))
    uniform = torch.rand(100, generator=generator(4), dtype=torch.float64)
    limits = Limits.of([Draw(1.0, top_p, None, top_k, min_p)] * 100)
    tokens = sample_probabilities(probabilities.repeat(100, 1), limits, uniform)
    for token, number in zip(tokens.tolist(), uniform.tolist(), strict=True):
        index = list(wanted).index(token)
        low = 0.0 if index == 0 else edges[index - 1]
        assert low - 1e-6 <= number <= edges[index] + 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])  # logits of bfloat16 are full of equals
def test_rows_of_all_kinds_do_not_depend_on_each_other(dtype: torch.dtype) -> None:
    logits = 2 * torch.randn(8, 1500, generator=generator(9))
    probabilities = logits.to(dtype).float().softmax(-1)
    draws = [
        Draw(1.0, top_p, None, top_k, min_p)
        for top_p, top_k, min_p in (
            (1.0, 0, 0.0), (0.9, 0, 0.0), (1.0, 50, 0.0), (1.0, 0, 0.3), (0.5, 700, 0.01), (1.0, 1500, 0.0),
            (0.999, 0, 0.0), (1.0, 9999, 0.5),
        )
    ]  # fmt: skip
    for uniform in torch.rand(50, 8, generator=generator(10), dtype=torch.float64):
        together = sample_probabilities(probabilities, Limits.of(draws), uniform).tolist()
        for row in range(8):
            one = slice(row, row + 1)
            alone = sample_probabilities(probabilities[one], Limits.of(draws[one]), uniform[one]).item()
            assert alone == together[row]


def test_the_tokens_that_may_come_are_those_of_the_kernels_reference() -> None:
    """A flat uniform grid reaches every token that either of them would draw."""
    from quantkit_kernels.reference import sample_tokens

    logits = torch.randn(1, 300, generator=generator(11)) * 2
    uniform = (torch.arange(2000, dtype=torch.float64) + 0.5) / 2000
    for top_k, top_p, min_p in ((10, 1.0, 0.0), (0, 0.8, 0.0), (0, 1.0, 0.1), (12, 0.7, 0.05)):
        theirs = sample_tokens(
            logits.repeat(2000, 1), torch.full((2000,), 0.9), torch.full((2000,), top_k, dtype=torch.int32),
            torch.full((2000,), top_p), torch.full((2000,), min_p), uniform,
        )  # fmt: skip
        limits = Limits.of([Draw(0.9, top_p, None, top_k, min_p)] * 2000)
        ours = sample_probabilities((logits / 0.9).softmax(-1).repeat(2000, 1), limits, uniform)
        counts = [torch.bincount(tokens, minlength=300) for tokens in (theirs, ours)]
        assert (counts[0] - counts[1]).abs().max() <= 2


@pytest.mark.parametrize(
    "draw",
    [(1e-46, 1.0, 0, 0.0), (1e-300, 0.9, 3, 0.1), (1e308, 1.0, 0, 0.0), (1.0, 5e-324, 2, 0.5), (1.0, 0.5, 10**30, 0.0)],
)
def test_extreme_numbers_of_a_row_do_not_reach_its_neighbour(draw: tuple[float, float, int, float]) -> None:
    logits = torch.randn(2, 30, generator=generator(7))
    logits[0, 3] = float("-inf")
    temperature, top_p, top_k, min_p = draw
    alone = sample(logits[1:], [Draw(1.0, 0.9, generator(2))])
    found = sample(logits, [Draw(temperature, top_p, generator(1), top_k, min_p), Draw(1.0, 0.9, generator(2))])
    assert found[1:] == alone
    assert found[0] is None or 0 <= found[0] < 30
