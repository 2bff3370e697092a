"""Structured output as the engine sees it: masks before sampling, tokens after, and what it records."""

from typing import Any

import pytest
import torch
from torch import Tensor

from quantkit.serve import SamplingParams
from quantkit.serve.outputs import RequestOutput

VOCAB = 320


class Script:
    """A form that allows one set of tokens after the other, and then nothing more.

    Args:
        steps: the tokens that may come at each place.
        ends_by_itself: say that it is finished; otherwise the end-of-text token 2 may follow.
    """

    def __init__(self, steps: list[set[int]], ends_by_itself: bool = True) -> None:
        self.steps = steps
        self.ends_by_itself = ends_by_itself
        self.accepted: list[int] = []

    @property
    def is_finished(self) -> bool:
        return self.ends_by_itself and len(self.accepted) == len(self.steps)

    def fill(self, row: Tensor) -> None:
        assert not row.any()
        place = len(self.accepted)
        for token in self.steps[place] if place < len(self.steps) else {2}:
            row[token // 32] |= 1 << (token % 32) if token % 32 < 31 else -(1 << 31)

    def accept(self, token_id: int) -> bool:
        allowed = token_id in self.steps[len(self.accepted)]
        self.accepted.append(token_id)
        return allowed


def submit(engine: Any, prompt: list[int], matcher: Any, **settings: Any) -> str:
    """A request with a matcher; how one is compiled is not the matter here."""
    name = engine.add_request(prompt, SamplingParams(**{"temperature": 0, "max_tokens": 20, **settings}))
    for request in engine.unfinished:
        if request.request_id == name:
            request.matcher = matcher() if callable(matcher) else matcher
    return str(name)


def run(engine: Any) -> dict[str, list[RequestOutput]]:
    outputs: dict[str, list[RequestOutput]] = {}
    while engine.has_unfinished:
        for output in engine.step():
            outputs.setdefault(output.request_id, []).append(output)
    return outputs


@pytest.mark.parametrize("temperature", [0, 1.5])
def test_tokens_follow_the_form_and_it_ends_the_text(engine: Any, random_prompt: Any, temperature: float) -> None:
    prompt = random_prompt(9, 1)
    masses = engine.score(prompt)[-1].exp()
    steps = [{31, 63, 64, 319}, {100}, {32, 33, 200}]
    matcher = Script(steps)
    name = submit(engine, prompt, matcher, temperature=temperature, seed=5)
    free = engine.add_request(prompt, SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
    outputs = run(engine)
    tokens = [token for output in outputs[name] for token in output.token_ids]
    assert matcher.accepted == tokens
    assert all(token in step for token, step in zip(tokens, steps, strict=True))
    last = outputs[name][-1]
    assert (last.finish_reason, last.stop_reason, last.num_forced_tokens) == ("stop", None, 1)
    assert last.legal_mass is not None
    scores = [engine.score(prompt + tokens[:place])[-1].exp() for place in range(3)]
    wanted = [float(score[sorted(step)].sum()) for score, step in zip(scores, steps, strict=True)]
    assert wanted[0] == pytest.approx(float(masses[sorted(steps[0])].sum()))
    assert last.legal_mass == pytest.approx(sum(wanted) / 3, rel=1e-3)
    text = "".join(output.text for output in outputs[name])
    assert text == engine.tokenizer.decode(tokens, skip_special_tokens=True)
    assert outputs[name][0].legal_mass is None
    assert (outputs[free][-1].legal_mass, outputs[free][-1].num_forced_tokens) == (None, None)  # rows do not mix
    assert len([token for output in outputs[free] for token in output.token_ids]) == 8


def test_logprobs_are_those_before_the_mask(engine: Any, random_prompt: Any) -> None:
    prompt = random_prompt(9, 1)
    score = engine.score(prompt)[-1]
    name = submit(engine, prompt, Script([{100}]), logprobs=1)
    (output,) = run(engine)[name]
    assert output.logprobs is not None
    assert output.logprobs[0][100][0] == pytest.approx(float(score[100]), abs=1e-3)
    assert int(score.argmax()) in output.logprobs[0]


def test_an_end_of_text_token_ends_it_and_is_not_accepted(engine: Any, random_prompt: Any) -> None:
    matcher = Script([{100}, {101}], ends_by_itself=False)
    name = submit(engine, random_prompt(9, 1), matcher)
    outputs = run(engine)[name]
    assert [token for output in outputs for token in output.token_ids] == [100, 101, 2]
    assert (outputs[-1].finish_reason, outputs[-1].stop_reason) == ("stop", 2)
    assert matcher.accepted == [100, 101]
    assert outputs[-1].num_forced_tokens == 3


def test_a_form_survives_preemption(make_engine: Any, random_prompt: Any) -> None:
    engine = make_engine("llama", num_blocks=6, max_num_batched_tokens=24)
    steps = [{50 + place, 150 + place} for place in range(30)]
    first = submit(engine, random_prompt(30, 1), Script(steps), max_tokens=40)
    second = submit(engine, random_prompt(30, 2), Script(steps), max_tokens=40)
    before = engine.metrics.preemptions
    outputs = run(engine)
    assert engine.metrics.preemptions > before
    for name in (first, second):
        tokens = [token for output in outputs[name] for token in output.token_ids]
        assert all(token in step for token, step in zip(tokens, steps, strict=True))
        assert outputs[name][-1].finish_reason == "stop"


class Broken(Script):
    def fill(self, row: Tensor) -> None:
        raise TimeoutError("too slow")


class Liar(Script):
    def accept(self, token_id: int) -> bool:
        return False


@pytest.mark.parametrize(
    ("matcher", "settings", "message"),
    [
        (lambda: Broken([{5}]), {}, "TimeoutError: too slow"),
        (lambda: Liar([{5}]), {}, "the structured form does not take token 5, which its mask allowed"),
        (lambda: Script([set()]), {}, "no token may come next: structured, min_tokens and logit_bias"),
        (lambda: Script([], ends_by_itself=False), {"min_tokens": 3}, "no token may come next"),
    ],
)
def test_a_form_that_fails_ends_its_own_request_only(
    matcher: Any, settings: dict[str, int], message: str, engine: Any, random_prompt: Any
) -> None:
    name = submit(engine, random_prompt(9, 1), matcher, **settings)
    other = submit(engine, random_prompt(9, 1), Script([{7}, {8}]))
    outputs = run(engine)
    assert [output.finish_reason for output in outputs[name]] == ["error"]
    assert message in (outputs[name][0].error or "")
    assert [token for output in outputs[other] for token in output.token_ids] == [7, 8]


def test_a_mask_on_bfloat16_logits(random_prompt: Any) -> None:
    from quantkit.serve.request import Request
    from quantkit.serve.token_mask import mask_logits

    request = Request("a", (1,), SamplingParams(), 5, frozenset(), None, None, matcher=Script([{3, 40}]))
    logits = torch.randn(1, 70).bfloat16()
    masked, errors = mask_logits(logits, [request])
    assert errors == {}
    assert masked.isfinite().nonzero()[:, 1].tolist() == [3, 40]
    assert torch.equal(masked[0, [3, 40]], logits[0, [3, 40]].float())
    assert logits.isfinite().all()
