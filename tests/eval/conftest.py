"""Models that implement the protocol and do exactly what a test tells them."""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence

import pytest
import torch
from torch import Tensor

from quantkit_eval.protocol import Generation, GenerationRequest, hash_token_ids
from tests.eval.fake_server import FakeServer, running

VOCAB_SIZE = 288


class FakeModel:
    """Answers from a function of the request; scores with a random bigram table.

    answer: request -> text. name: of the model and its checkpoint. noise: how far the bigram table is from the one that
    every fake model shares. template: put around each prompt.
    """

    def __init__(
        self,
        answer: Callable[[GenerationRequest], str] = lambda request: "{}",
        *,
        name: str = "fake",
        noise: float = 0.0,
        template: str = "<{}>",
    ) -> None:
        self.answer, self.name, self.template = answer, name, template
        generator = torch.Generator().manual_seed(1)
        table = torch.randn(VOCAB_SIZE, VOCAB_SIZE, generator=generator)
        self.table = table + noise * torch.randn(VOCAB_SIZE, VOCAB_SIZE, generator=generator)
        self.calls = 0

    def describe(self) -> dict[str, object]:
        return {
            "model": {"name": self.name, "revision": None, "checkpoint_hash": self.name, "scheme": None},
            "engine": {"name": "fake-engine"},
            "template_hash": hashlib.sha256(self.template.encode()).hexdigest(),
        }

    def generate(self, requests: Sequence[GenerationRequest]) -> list[Generation]:
        self.calls += 1
        return [self._generation(request) for request in requests]

    def _generation(self, request: GenerationRequest) -> Generation:
        prompt = self.tokenize(self.template.format(request.messages[-1]["content"]))
        tokens = self.tokenize(self.answer(request))
        if request.ignore_eos:
            tokens = (tokens * request.max_tokens)[: request.max_tokens] or [0] * request.max_tokens
        kept = tokens[: request.max_tokens * 4]  # four bytes make a token of text
        text = bytes(kept).decode(errors="replace")
        finish_reason = "length" if len(kept) < len(tokens) or request.ignore_eos else "stop"
        return Generation(request.id, text, tuple(kept), finish_reason, hash_token_ids(prompt), len(prompt))

    def tokenize(self, text: str) -> list[int]:
        return list(text.encode())

    def score(self, token_ids: Sequence[int]) -> Tensor:
        return self.table[torch.tensor(token_ids)].log_softmax(dim=1)


def draw(item: str, salt: str) -> float:
    """A number in [0, 1) that depends on the two texts alone."""
    return int.from_bytes(hashlib.sha256(f"{salt}/{item}".encode()).digest()[:6], "big") / 2**48


def answer_with_errors(golds: Mapping[str, object], error_rate: float, salt: str) -> Callable[[GenerationRequest], str]:
    """The right object, or with probability error_rate one whose end is missing, so that no field counts."""

    def answer(request: GenerationRequest) -> str:
        text = json.dumps(golds[request.id], ensure_ascii=False)
        return text[:-1] if draw(request.id, salt) < error_rate else text

    return answer


@pytest.fixture(scope="session")
def fake_model() -> type[FakeModel]:
    return FakeModel


@pytest.fixture(scope="session")
def erring_model() -> Callable[..., FakeModel]:
    """A model that gets a share of the extract items wrong: (num_items, seed, error_rate, salt, **FakeModel's)."""
    from quantkit_eval.suites.extract_items import generate_items

    def make(num_items: int, seed: int, error_rate: float, salt: str = "errors", **options: object) -> FakeModel:
        golds = {item.id: item.gold for item in generate_items(num_items, seed)}
        return FakeModel(answer_with_errors(golds, error_rate, salt), **options)  # type: ignore[arg-type]

    return make


@pytest.fixture
def fake() -> Iterator[FakeServer]:
    """A server whose answers the test decides."""
    with running() as server:
        yield server
