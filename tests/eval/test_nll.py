"""Perplexity and divergence against direct computations, and the reference file that carries one run to the other."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from quantkit_eval.errors import ModelOutputError, OptionError, RecordError, ReferenceMismatch
from quantkit_eval.evaluate import evaluate
from quantkit_eval.records import read_samples
from quantkit_eval.reference import Reference, TokenDistributions

TEXT = "The quick brown fox jumps over the lazy dog.\n\n<|document|>\nIt did so again, and äöü.\n" * 3
OPTIONS = {"window_tokens": 16}


@pytest.fixture
def text_path(tmp_path: Path) -> str:
    path = tmp_path / "text.txt"
    path.write_text(TEXT, encoding="utf-8")
    return str(path)


def kl_of(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Over the whole vocabulary, from the definition."""
    return (log_p.double().exp() * (log_p.double() - log_q.double())).sum(dim=1)


class TransformersModel:
    """A tiny random decoder behind the protocol; bytes are its tokens."""

    def __init__(self, seed: int, noise: float = 0.0) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(seed)
        config = LlamaConfig(
            vocab_size=320,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            initializer_range=0.2,
        )
        self.model = LlamaForCausalLM(config).eval()
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter += noise * torch.randn_like(parameter)

    def describe(self) -> dict[str, object]:
        return {"model": {"name": "tiny"}, "engine": {"name": "transformers"}, "template_hash": "none"}

    def generate(self, requests: Sequence[object]) -> list[Any]:
        raise AssertionError("nll generates nothing")

    def tokenize(self, text: str) -> list[int]:
        return list(text.encode())

    @torch.no_grad()
    def score(self, token_ids: Sequence[int]) -> Tensor:
        return self.model(torch.tensor([token_ids])).logits[0].log_softmax(dim=1)


def test_a_real_decoder_gets_its_exact_divergence(tmp_path: Path, text_path: str) -> None:
    """Of the vocabulary of 320 the reference keeps 256 outcomes, and draws from the rest."""
    baseline, candidate = TransformersModel(0), TransformersModel(0, noise=0.01)
    options = {"nll": OPTIONS | {"text_path": text_path}}
    first = evaluate(baseline, options, 0, tmp_path / "a")
    second = evaluate(candidate, options, 0, tmp_path / "b", reference=tmp_path / "a")

    documents = [document.strip("\n") for document in TEXT.split("<|document|>\n")]
    tokens, kl, nll, agree = 0, 0.0, [0.0, 0.0], 0
    for document in documents:
        ids = list(document.encode())
        shares = math.ceil(len(ids) / 16)
        for i in range(shares):
            window = ids[i * len(ids) // shares : (i + 1) * len(ids) // shares]
            log_p, log_q = baseline.score(window)[:-1], candidate.score(window)[:-1]
            tokens += len(window) - 1
            kl += float(kl_of(log_p, log_q).sum())
            agree += int((log_p.argmax(1) == log_q.argmax(1)).sum())
            for side, rows in enumerate((log_p, log_q)):
                nll[side] -= sum(float(row[target]) for row, target in zip(rows, window[1:], strict=True))

    metrics = second["suites"]["nll"]["metrics"]
    assert kl / tokens > 0.01
    assert metrics["kl_mean_nats"]["value"] == pytest.approx(kl / tokens, rel=2e-3)
    assert metrics["top1_agreement"]["value"] == pytest.approx(agree / tokens)
    assert metrics["perplexity"]["value"] == pytest.approx(math.exp(nll[1] / tokens), rel=1e-5)
    assert metrics["perplexity_ratio"]["value"] == pytest.approx(math.exp((nll[1] - nll[0]) / tokens), rel=1e-5)
    assert first["suites"]["nll"]["metrics"]["nll_nats"]["value"] == pytest.approx(nll[0] / tokens, rel=1e-5)
    assert set(first["suites"]["nll"]["metrics"]) == {"nll_nats", "perplexity"}
    assert sum(second["suites"]["nll"]["histograms"]["kl_nats"]["counts"]) == tokens


def test_a_model_is_no_distance_from_itself(tmp_path: Path, text_path: str) -> None:
    model = TransformersModel(0)
    options = {"nll": OPTIONS | {"text_path": text_path}}
    evaluate(model, options, 0, tmp_path / "a")
    metrics = evaluate(model, options, 0, tmp_path / "b", tmp_path / "a")["suites"]["nll"]["metrics"]
    assert 0 <= metrics["kl_mean_nats"]["value"] < 1e-6
    assert metrics["top1_agreement"]["value"] == 1.0
    assert metrics["perplexity_ratio"]["value"] == pytest.approx(1.0, abs=1e-6)


def two_distributions(tokens: int, vocab_size: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(vocab_size)
    log_p = (3 * torch.randn(tokens, vocab_size, generator=generator)).log_softmax(1)
    return log_p, (log_p + 0.5 * torch.randn(tokens, vocab_size, generator=generator)).log_softmax(1)


@pytest.mark.parametrize("top_k", [63, 64, 500])
def test_a_small_vocabulary_gets_its_exact_divergence(top_k: int) -> None:
    """With one outcome left, the rest is that outcome; with none, there is no rest."""
    log_p, log_q = two_distributions(50, 64)
    kept = TokenDistributions.from_log_probs(log_p, torch.zeros(50), seed=0, top_k=top_k)
    assert kept.tail_ids.shape == (50, 32 if top_k == 63 else 0)
    torch.testing.assert_close(kept.kl_divergence(log_q), kl_of(log_p, log_q), rtol=0, atol=2e-3)  # float16


@pytest.mark.parametrize("top_k", [1, 8])
def test_the_tail_is_estimated_without_bias(top_k: int) -> None:
    """The kept outcomes alone bound the divergence from below; the drawn ones close the gap."""
    log_p, log_q = two_distributions(2_000, 64)
    exact = kl_of(log_p, log_q)
    kept = TokenDistributions.from_log_probs(log_p, torch.zeros(2_000), seed=0, top_k=top_k, tail_samples=16)
    coarse = dataclasses.replace(kept, tail_ids=kept.tail_ids[:, :0]).kl_divergence(log_q)
    assert (coarse >= 0).all()
    assert (coarse <= exact + 2e-3).all()
    error = kept.kl_divergence(log_q) - exact
    assert coarse.mean() < exact.mean() - 0.005
    assert abs(error.mean()) < 3 * error.std() / math.sqrt(2_000)
    assert error.std() / math.sqrt(2_000) < 0.004


def test_draws_depend_on_the_seed_alone() -> None:
    log_p, _ = two_distributions(20, 64)
    first, again, other = (
        TokenDistributions.from_log_probs(log_p, torch.zeros(20), seed=seed, top_k=4) for seed in (0, 0, 1)
    )
    assert torch.equal(first.tail_ids, again.tail_ids)
    assert not torch.equal(first.tail_ids, other.tail_ids)
    assert not (first.tail_ids.long()[:, :, None] == first.top_ids.long()[:, None, :]).any()


def test_a_rest_bucket_is_what_is_left() -> None:
    log_p = torch.tensor([[0.5, 0.25, 0.125, 0.125]]).log()
    drawn = TokenDistributions.from_log_probs(log_p, torch.zeros(1), seed=0, top_k=2)
    kept = dataclasses.replace(drawn, tail_ids=drawn.tail_ids[:, :0])
    assert kept.rest_log_probs.exp().item() == pytest.approx(0.25)
    assert kept.top_ids.tolist() == [[0, 1]]
    assert kept.argmax.tolist() == [0]
    log_q = torch.tensor([[0.25, 0.25, 0.5, 0.0001]]).log().log_softmax(1)
    q = log_q.exp()[0]
    expected = 0.5 * math.log(0.5 / q[0]) + 0.25 * math.log(0.25 / q[1]) + 0.25 * math.log(0.25 / (q[2] + q[3]))
    assert kept.kl_divergence(log_q).item() == pytest.approx(expected, rel=1e-3)


def test_every_token_but_the_first_of_a_window_counts_once(
    tmp_path: Path, text_path: str, fake_model: Callable[..., Any]
) -> None:
    evaluate(fake_model(), {"nll": OPTIONS | {"text_path": text_path}}, 0, tmp_path / "a")
    windows = read_samples(tmp_path / "a" / "samples.jsonl")
    sizes = [int(window["metrics"]["num_tokens"]) + 1 for window in windows]  # type: ignore[arg-type]
    documents = [document.strip("\n") for document in TEXT.split("<|document|>\n")]
    assert sum(sizes) == sum(len(document.encode()) for document in documents)
    assert max(sizes) <= 16
    assert min(sizes) > 8


def test_some_windows_are_spread_over_the_text(tmp_path: Path, text_path: str, fake_model: Callable[..., Any]) -> None:
    options = OPTIONS | {"text_path": text_path}
    evaluate(fake_model(), {"nll": options}, 0, tmp_path / "all")
    evaluate(fake_model(), {"nll": options | {"max_windows": 3}}, 0, tmp_path / "three")
    every = [sample["prompt_hash"] for sample in read_samples(tmp_path / "all" / "samples.jsonl")]
    three = [sample["prompt_hash"] for sample in read_samples(tmp_path / "three" / "samples.jsonl")]
    assert three == [every[i * len(every) // 3] for i in range(3)]


def test_the_built_in_text_has_windows_of_many_kinds(tmp_path: Path, fake_model: Callable[..., Any]) -> None:
    result = evaluate(fake_model(), {"nll": {"max_windows": 12}}, 0, tmp_path)
    assert result["suites"]["nll"]["num_items"] == 12


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"window_tokens": 12}, "windows of another size: window_tokens is 16, here it is 12"),
        ({"max_windows": 2}, "other token ids"),
        ({"text_path": None}, "another text"),
    ],
)
def test_a_reference_of_something_else_is_refused(
    tmp_path: Path, text_path: str, fake_model: Callable[..., Any], change: dict[str, Any], words: str
) -> None:
    options = OPTIONS | {"text_path": text_path}
    evaluate(fake_model(), {"nll": options}, 0, tmp_path / "a")
    with pytest.raises(ReferenceMismatch, match=words):
        evaluate(fake_model(), {"nll": options | change}, 0, tmp_path / "b", tmp_path / "a")
    assert not (tmp_path / "b").exists()


def test_a_reference_of_another_tokenizer_or_vocabulary_is_refused(
    tmp_path: Path, text_path: str, fake_model: Callable[..., Any]
) -> None:
    options = {"nll": OPTIONS | {"text_path": text_path}}
    evaluate(fake_model(), options, 0, tmp_path / "a")

    class Shifted(fake_model):  # type: ignore[misc,valid-type]
        def tokenize(self, text: str) -> list[int]:
            return [(byte + 1) % 256 for byte in text.encode()]

    class Larger(fake_model):  # type: ignore[misc,valid-type]
        def score(self, token_ids: Sequence[int]) -> Tensor:
            return torch.nn.functional.pad(self.table[torch.tensor(token_ids)], (0, 5)).log_softmax(dim=1)

    with pytest.raises(ReferenceMismatch, match="another tokenizer"):
        evaluate(Shifted(), options, 0, tmp_path / "b", tmp_path / "a")
    with pytest.raises(ReferenceMismatch, match="vocabulary of 288, this model has 293"):
        evaluate(Larger(), options, 0, tmp_path / "b", tmp_path / "a")


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda rows: rows[:-1], r"score gave \(15, 288\)"),
        (lambda rows: rows.double(), "float64"),
        (lambda rows: rows + 1, "is it logits"),
        (lambda rows: rows.index_fill(1, torch.tensor([3]), math.nan), "NaN"),
    ],
)
def test_scores_that_are_no_log_probabilities_are_refused(
    tmp_path: Path, fake_model: Callable[..., Any], spoil: Callable[[Tensor], Tensor], words: str
) -> None:
    class Spoiled(fake_model):  # type: ignore[misc,valid-type]
        def score(self, token_ids: Sequence[int]) -> Tensor:
            return spoil(super().score(token_ids))

    (tmp_path / "t").write_text("abcdefghijklmnop")
    with pytest.raises(ModelOutputError, match=words):
        evaluate(Spoiled(), {"nll": {"text_path": str(tmp_path / "t")}}, 0, tmp_path / "a")


def test_a_damaged_model_is_measured_although_no_float_holds_its_perplexity(
    tmp_path: Path, text_path: str, fake_model: Callable[..., Any]
) -> None:
    class Damaged(fake_model):  # type: ignore[misc,valid-type]
        def score(self, token_ids: Sequence[int]) -> Tensor:
            return (super().score(token_ids) * 1e6).log_softmax(dim=1)

    options = {"nll": OPTIONS | {"text_path": text_path}}
    evaluate(fake_model(), options, 0, tmp_path / "a")
    metrics = evaluate(Damaged(), options, 0, tmp_path / "b", tmp_path / "a")["suites"]["nll"]["metrics"]
    assert (metrics["perplexity"]["value"], metrics["perplexity_ratio"]["value"]) == (None, None)
    assert min(metrics["nll_nats"]["value"], metrics["kl_mean_nats"]["value"]) > 1000


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"window_tokens": 1}, "window_tokens=1 must be at least 2"),
        ({"text_path": "no-such-file"}, "cannot be read"),
        ({"windows": 3}, "no option 'windows'. Choose from window_tokens, max_windows, text_path"),
        ({"max_windows": "3"}, "must be int, not '3'"),
        ({"max_windows": True}, "must be int, not True"),
    ],
)
def test_wrong_options_are_named(
    tmp_path: Path, fake_model: Callable[..., Any], options: dict[str, Any], words: str
) -> None:
    with pytest.raises(OptionError, match=words) as caught:
        evaluate(fake_model(), {"nll": options}, 0, tmp_path)
    assert caught.value.exit_code == 2


def test_an_empty_text_is_an_error(tmp_path: Path, fake_model: Callable[..., Any]) -> None:
    (tmp_path / "t").write_text("x\n")
    with pytest.raises(OptionError, match="fewer than 2 tokens"):
        evaluate(fake_model(), {"nll": {"text_path": str(tmp_path / "t")}}, 0, tmp_path / "a")


def test_a_missing_or_foreign_reference_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="no such reference file"):
        Reference(tmp_path)
    (tmp_path / "nll.safetensors").write_bytes(b"junk")
    with pytest.raises(RecordError, match="no reference file"):
        Reference(tmp_path)
    save_file({"weight": torch.zeros(2)}, tmp_path / "nll.safetensors")
    with pytest.raises(RecordError, match="no reference file of version 1"):
        Reference(tmp_path / "nll.safetensors")


def test_the_reference_says_who_made_it(tmp_path: Path, text_path: str, fake_model: Callable[..., Any]) -> None:
    evaluate(fake_model(name="origin"), {"nll": OPTIONS | {"text_path": text_path}}, 0, tmp_path / "a")
    reference = Reference(tmp_path / "a")
    assert reference.metadata["model"]["model"]["name"] == "origin"
    assert reference.window(0).top_log_probs.dtype == torch.float16
    assert reference.window(0).top_ids.dtype == torch.uint16
