"""sample_tokens and apply_token_bitmask: the references against a plain reading, the Triton kernels against them."""

import math
from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from torch import Tensor

import quantkit_kernels
from quantkit_kernels import reference
from quantkit_kernels.reference import sampling


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    pytest.importorskip("triton", reason="needs triton, which is for Linux")
    from quantkit_kernels import triton_sampling

    monkeypatch.setattr(triton_sampling, "BLOCK", 128)  # several tiles of a small vocabulary
    monkeypatch.setattr(triton_sampling, "MASK_BLOCK", 64)
    return triton_sampling


def make_rows(
    rows: int, vocab_size: int, dtype: torch.dtype, *, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0,
    min_p: float = 0.0,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Logits with a stride, the same parameters for all rows, random numbers."""
    generator = torch.Generator().manual_seed(rows + vocab_size)
    logits = (3 * torch.randn(rows, vocab_size + 7, generator=generator)).to(dtype)[:, :vocab_size]
    return (
        logits,
        torch.full((rows,), temperature),
        torch.full((rows,), top_k, dtype=torch.int32),
        torch.full((rows,), top_p),
        torch.full((rows,), min_p),
        torch.rand(rows, generator=generator, dtype=torch.float64),
    )


def plainly(logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: float, uniform: float) -> int:
    """One row in float64, token by token."""
    if temperature == 0:
        return logits.tolist().index(max(logits.tolist()))
    scaled = [float(logit) / temperature for logit in logits.float()]
    weights = [math.exp(logit - max(scaled)) for logit in scaled]
    order = sorted(range(len(weights)), key=lambda token: (-weights[token], token))
    order = [token for token in order if weights[token] >= min_p][: top_k or None]
    target, kept, mass = top_p * sum(weights[token] for token in order), set(), 0.0
    for token in order:
        if mass < target:
            kept.add(token)
            mass += weights[token]
    seen = 0.0
    for token in sorted(kept):
        seen += weights[token]
        if seen > uniform * mass:
            return token
    raise AssertionError("the random number is below 1")


PARAMETERS = [
    {},
    {"temperature": 0.0},
    {"temperature": 0.3, "top_p": 0.9},
    {"temperature": 2.0, "top_k": 20},
    {"top_k": 1},
    {"top_k": 40, "top_p": 0.5, "min_p": 0.02},
    {"min_p": 0.1},
    {"min_p": 1.0},
    {"top_p": 1e-6},
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("parameters", PARAMETERS, ids=str)
def test_the_reference_is_what_it_says(dtype: torch.dtype, parameters: dict[str, float]) -> None:
    case = make_rows(40, 50, dtype, **parameters)  # type: ignore[arg-type]
    actual = reference.sample_tokens(*case)
    assert actual.dtype == torch.int64
    full = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | parameters
    wanted = [
        plainly(row, full["temperature"], int(full["top_k"]), full["top_p"], full["min_p"], float(uniform))
        for row, uniform in zip(case[0], case[-1], strict=True)
    ]
    assert actual.tolist() == wanted


def test_probabilities_are_exponentials() -> None:
    logits = torch.linspace(-40, 0, 4001).unsqueeze(0)
    actual = sampling.relative_probability(logits, torch.tensor([0.7]))[0].double()
    wanted = torch.exp(logits[0].double() / 0.7)
    is_large = wanted > 2.0**-60
    assert ((actual - wanted).abs() / wanted)[is_large].max() < 5e-6  # what rounding an exponent of 57 to 24 bits costs
    near = wanted > 0.5
    assert ((actual - wanted).abs() / wanted)[near].max() < 3e-7
    assert actual[-1] == 1
    assert (actual.diff() >= 0).all()


def test_frequencies_are_the_probabilities() -> None:
    logits = torch.log(torch.tensor([0.5, 0.2, 0.2, 0.1])).expand(10000, 4)
    uniform = (torch.arange(10000, dtype=torch.float64) + 0.5) / 10000
    ones, none = torch.ones(10000), torch.zeros(10000)
    tokens = reference.sample_tokens(logits, ones, none.int(), ones, none, uniform)
    assert (torch.bincount(tokens) - torch.tensor([5000, 2000, 2000, 1000])).abs().max() <= 1
    tokens = reference.sample_tokens(logits, ones, none.int(), 0.65 * ones, none, uniform)
    assert torch.bincount(tokens, minlength=4).tolist() == pytest.approx(
        [7143, 2857, 0, 0], abs=1
    )  # of two equal ones the first


@pytest.mark.parametrize(
    ("rows", "vocab_size", "dtype"), [(10, 300, torch.float32), (3, 130, torch.bfloat16), (1, 1, torch.float16)]
)
def test_the_kernel_draws_the_references_tokens(
    kernels: ModuleType, rows: int, vocab_size: int, dtype: torch.dtype
) -> None:
    logits, *_, uniform = make_rows(rows, vocab_size, dtype)
    sets = [PARAMETERS[index % len(PARAMETERS)] for index in range(rows)]
    columns = {
        name: torch.tensor([float(each.get(name, default)) for each in sets])
        for name, default in (("temperature", 1.0), ("top_k", 0), ("top_p", 1.0), ("min_p", 0.0))
    }
    columns["top_k"] = columns["top_k"].int()
    arguments = (logits, *columns.values(), uniform)
    assert torch.equal(kernels.sample_tokens(*arguments), reference.sample_tokens(*arguments))


@pytest.mark.parametrize("parameters", [{"top_k": 36}, {"top_p": 0.5}, {"top_k": 66, "top_p": 0.6}], ids=str)
def test_equal_tokens_are_kept_in_their_order(kernels: ModuleType, parameters: dict[str, float]) -> None:
    case = list(make_rows(2, 140, torch.float32, **parameters))  # type: ignore[arg-type]
    case[0] = torch.arange(140).remainder(3).float().expand(2, 140).contiguous()
    case[-1] = torch.tensor([0.4, 1 - 2**-53], dtype=torch.float64)
    actual = kernels.sample_tokens(*case)
    assert torch.equal(actual, reference.sample_tokens(*case))
    uniform = case[-1].tolist()
    wanted = [
        plainly(row, 1.0, int(parameters.get("top_k", 0)), parameters.get("top_p", 1.0), 0.0, uniform[index])
        for index, row in enumerate(case[0])
    ]
    assert actual.tolist() == wanted


@pytest.mark.parametrize("body", ["reference", "triton"])
def test_rows_without_a_distribution_say_so(kernels: ModuleType, body: str) -> None:
    case = make_rows(6, 140, torch.float32)
    case[0][0, 3] = float("nan")
    case[0][1, 3] = float("inf")
    case[0][2] = float("-inf")
    case[0][3] = float("-inf")
    case[0][3, 139] = -5.0  # the only one that is left
    case[1][4] = 0
    case[0][4, 100] = case[0][4, 20] = 50.0  # the first of equal ones
    case[0][5, 4] = float("nan")
    case[1][5] = 0
    sample = reference.sample_tokens if body == "reference" else kernels.sample_tokens
    assert sample(*case).tolist() == [-1, -1, -1, 139, 20, -1]


def test_no_row_is_legal(kernels: ModuleType) -> None:
    assert kernels.sample_tokens(*make_rows(0, 9, torch.float32)).shape == (0,)
    assert reference.sample_tokens(*make_rows(0, 9, torch.float32)).shape == (0,)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("rows", "vocab_size"), [(1, 32), (3, 129), (2, 63)])
def test_forbidden_tokens_become_minus_infinity(
    kernels: ModuleType, dtype: torch.dtype, rows: int, vocab_size: int
) -> None:
    generator = torch.Generator().manual_seed(vocab_size)
    padded = torch.randn(rows, vocab_size + 3, generator=generator).to(dtype)
    words = torch.randint(-(2**31), 2**31, (rows, -(-vocab_size // 32)), generator=generator).to(torch.int32)
    wanted = padded.clone()
    for row in range(rows):
        for token in range(vocab_size):
            if not int(words[row, token // 32]) >> (token % 32) & 1:
                wanted[row, token] = float("-inf")
    for body in (reference, kernels, quantkit_kernels):
        actual = padded.clone()
        body.apply_token_bitmask(actual[:, :vocab_size], words)
        assert torch.equal(actual, wanted)


@pytest.mark.parametrize("body", ["reference", "triton", "public"])
@pytest.mark.parametrize(
    ("index", "change", "message"),
    [
        (0, lambda t: t[0], r"logits is torch.float32 \[9\], allowed is torch.float32 or .* \[R, V\]"),
        (0, lambda t: t[:, :0], r"logits has no column, allowed is 1 or more"),
        (1, lambda t: t.double(), r"temperature is torch.float64 \[2\], allowed is torch.float32 \[2\]"),
        (2, lambda t: t.long(), r"top_k is torch.int64 \[2\], allowed is torch.int32 \[2\]"),
        (3, lambda t: t[:1], r"top_p is torch.float32 \[1\], allowed is torch.float32 \[2\]"),
        (4, lambda t: t.to("meta"), r"min_p is on meta, allowed is the device of the first argument, cpu"),
        (5, lambda t: t.float(), r"uniform is torch.float32 \[2\], allowed is torch.float64 \[2\]"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(
    kernels: ModuleType, body: str, index: int, change: Callable[[Tensor], Tensor], message: str
) -> None:
    case = list(make_rows(2, 9, torch.float32))
    case[index] = change(case[index])
    module = {"reference": reference, "public": quantkit_kernels}.get(body, kernels)
    with pytest.raises(ValueError, match=message):
        module.sample_tokens(*case)


def test_bitmasks_that_do_not_fit_are_refused(kernels: ModuleType) -> None:
    for module in (reference, kernels, quantkit_kernels):
        with pytest.raises(ValueError, match=r"bitmask is torch.int32 \[1, 1\], allowed is torch.int32 \[1, 2\]"):
            module.apply_token_bitmask(torch.zeros(1, 33), torch.zeros(1, 1, dtype=torch.int32))
        with pytest.raises(ValueError, match=r"bitmask is torch.int64 \[1, 2\], allowed is torch.int32 \[1, 2\]"):
            module.apply_token_bitmask(torch.zeros(1, 33), torch.zeros(1, 2, dtype=torch.int64))
