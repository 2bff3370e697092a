"""How to continue a prompt; the names are vLLM's, and every field acts."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from quantkit.errors import UsageError
from quantkit.serve.chat import require_text
from quantkit.serve.structured.spec import StructuredOutput

MAX_SEED = 2**63 - 1
MAX_N = 128
MAX_LOGPROBS = 20
# What float32 tells apart: logits are divided and multiplied by these, and neither 0, inf nor NaN may come of it.
LEAST_TEMPERATURE = 1e-30
MAX_TEMPERATURE = 1e6
LEAST_REPETITION_PENALTY, MAX_REPETITION_PENALTY = 1e-6, 1e6


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to continue a prompt. A field of vLLM's that is not here is not supported.

    The logits of a token are changed in this order: structured, min_tokens and logit_bias, repetition, frequency and
    presence penalty; then greedy, or temperature, min_p, top_k, top_p.

    Attributes:
        temperature: 0 is greedy, and so is what is below 1e-30; otherwise logits are divided by it; up to 1e6.
        top_p: sample from the most likely tokens that together reach this probability; in (0, 1].
        max_tokens: most new tokens; None is as many as the model and the cache have room for.
        stop: strings that end the text and are not part of it.
        stop_token_ids: tokens that end the text, besides the model's own.
        ignore_eos: go on when the model says that it is done.
        seed: of this request's sampling; the same seed gives the same tokens whatever else runs, as far as the logits
            agree (with ``EngineConfig.deterministic`` they do). Of n continuations, number i has the seed + i. None
            takes one from the engine's seed and the number of the request.
        top_k: sample from this many most likely tokens; 0 is all.
        min_p: sample from tokens with at least this share of the largest probability; in [0, 1].
        presence_penalty: taken from the logit of every token that the continuation holds; in [-2, 2].
        frequency_penalty: taken as often as the continuation holds the token; in [-2, 2].
        repetition_penalty: positive logits of tokens that occur in prompt or continuation are divided by it, negative
            ones multiplied; from 1e-6 to 1e6, 1 is none.
        min_tokens: no token or string ends the text before it has so many tokens; not with a form, which says itself
            where the text ends.
        n: continuations of the prompt; 1 to 128.
        logprobs: give the log-probability of each new token, and of so many most likely ones; 0 to 20. They are the
            model's own, before anything above changes them.
        prompt_logprobs: the same for the tokens of the prompt.
        logit_bias: token id -> what is added to its logit, -100 to 100.
        structured: a form that the text must have.

    Raises:
        UsageError: a value out of range.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    max_tokens: int | None = 16
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    seed: int | None = None
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    min_tokens: int = 0
    n: int = 1
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    structured: StructuredOutput | None = None

    def __post_init__(self) -> None:
        self._check_numbers()
        self._check_integers()
        object.__setattr__(self, "stop", (self.stop,) if isinstance(self.stop, str) else tuple(self.stop))
        for text in self.stop:
            if not isinstance(text, str) or not text:
                raise UsageError(f"stop={list(self.stop)!r} holds {text!r}, which is no string with characters in it")
            require_text(text, "stop")
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        for token_id in self.stop_token_ids:
            if not _is_integer(token_id) or token_id < 0:
                raise UsageError(f"stop_token_ids holds {token_id!r}, which is no token id")
        if not isinstance(self.ignore_eos, bool):
            raise UsageError(f"ignore_eos={self.ignore_eos!r} is neither True nor False")
        self._check_logit_bias()
        if self.structured is not None and not isinstance(self.structured, StructuredOutput):
            raise UsageError(
                f"structured={self.structured!r} is no StructuredOutput",
                fix="make one with StructuredOutput.json_schema, regex, grammar or choice",
            )
        if self.structured is not None and self.min_tokens:
            raise UsageError(
                f"min_tokens={self.min_tokens} and a form of the answer exclude each other: the form says where it ends"
            )

    def _check_numbers(self) -> None:
        self._check(
            "temperature",
            _is_number(self.temperature) and 0 <= self.temperature <= MAX_TEMPERATURE,
            f"a number of 0 or more, up to {MAX_TEMPERATURE:g}",
        )
        self._check("top_p", _is_number(self.top_p) and 0 < self.top_p <= 1, "a number above 0 and up to 1")
        self._check("min_p", _is_number(self.min_p) and 0 <= self.min_p <= 1, "a number from 0 to 1")
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            self._check(name, _is_number(value) and -2 <= value <= 2, "a number from -2 to 2")
        penalty = self.repetition_penalty
        lowest, highest = LEAST_REPETITION_PENALTY, MAX_REPETITION_PENALTY
        is_right = _is_number(penalty) and lowest <= penalty <= highest
        self._check("repetition_penalty", is_right, f"a number above 0, from {lowest:g} to {highest:g}")

    def _check_integers(self) -> None:
        for name, lowest, highest, may_be_none in (
            ("max_tokens", 1, None, True),
            ("seed", 0, MAX_SEED, True),
            ("logprobs", 0, MAX_LOGPROBS, True),
            ("prompt_logprobs", 0, MAX_LOGPROBS, True),
            ("top_k", 0, None, False),
            ("min_tokens", 0, None, False),
            ("n", 1, MAX_N, False),
        ):
            value = getattr(self, name)
            if value is None and may_be_none:
                continue
            is_right = _is_integer(value) and value >= lowest and (highest is None or value <= highest)
            wanted = f"an integer of {lowest} or more" if highest is None else f"an integer from {lowest} to {highest}"
            if not is_right:
                raise UsageError(f"{name}={value!r} is {'neither None nor' if may_be_none else 'not'} {wanted}")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise UsageError(f"min_tokens={self.min_tokens} is more than max_tokens={self.max_tokens}")

    def _check_logit_bias(self) -> None:
        if not isinstance(self.logit_bias, Mapping):
            raise UsageError(f"logit_bias={self.logit_bias!r} is no mapping from token ids to numbers")
        for token_id, bias in self.logit_bias.items():
            if not _is_integer(token_id) or token_id < 0:
                raise UsageError(f"logit_bias holds {token_id!r}, which is no token id")
            if not (_is_number(bias) and -100 <= bias <= 100):
                raise UsageError(f"logit_bias={bias!r} of token {token_id} is not a number from -100 to 100")
        object.__setattr__(self, "logit_bias", dict(self.logit_bias))

    def _check(self, name: str, is_right: bool, wanted: str) -> None:
        if not is_right:
            raise UsageError(f"{name}={getattr(self, name)!r} is not {wanted}")

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> "SamplingParams":
        """Make it from names and values that came from outside; an unknown name is refused, never ignored.

        Raises:
            UsageError: a name that is not supported, or a value out of range.
        """
        known = [item.name for item in fields(cls)]
        for name in values:
            if name not in known:
                raise UsageError(
                    f"the sampling parameter {name} is not supported", fix=f"choose from {', '.join(known)}"
                )
        return cls(**values)

    @property
    def is_greedy(self) -> bool:
        """True if no random number is drawn."""
        return self.temperature < LEAST_TEMPERATURE

    @property
    def counts_tokens(self) -> bool:
        """True if logits depend on the tokens that were there before, through a penalty."""
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1)


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return _is_integer(value) or (isinstance(value, float) and math.isfinite(value))
