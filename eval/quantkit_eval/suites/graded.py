"""A suite with right and wrong answers: asks for every item, greedy, measures each answer and summarises.

What differs between such suites is only where the items come from and how an answer is measured; both are functions.
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from quantkit_eval.errors import OptionError
from quantkit_eval.protocol import Generation, GenerationRequest, Message
from quantkit_eval.record_types import Metric, MetricValue, Sample
from quantkit_eval.records import SCHEMA_VERSION
from quantkit_eval.suites import SuiteOutcome, SuiteRun, parse_options
from quantkit_eval.suites.degeneration import is_looped, longest_whitespace_run
from quantkit_eval.suites.shares import mean_of, mean_share, part_accuracy, share_of

Metrics = dict[str, MetricValue]


@dataclass(frozen=True, slots=True)
class Item:
    """One question with its answer.

    Attributes:
        id: unique in its suite; built-in suites name what is asked and the level, 1 being the easiest.
        prompt: the user's turn, or the chat, as records show it.
        gold: what is right: any JSON value; None if only the schema says what is.
        schema: the JSON Schema that the answer has to fit, if there is one.
        messages: a whole chat in place of the prompt alone.
        max_tokens: of the answer, in place of the suite's.
    """

    id: str
    prompt: str
    gold: Any
    schema: Mapping[str, Any] | None = None
    messages: tuple[Message, ...] = ()
    max_tokens: int | None = None

    @classmethod
    def of_chat(
        cls,
        id: str,  # noqa: A002 - the attribute's name
        messages: Sequence[Message],
        gold: Any,
        schema: Mapping[str, Any] | None = None,
        max_tokens: int | None = None,
    ) -> "Item":
        """An item that asks with a whole chat; its prompt is the chat as text."""
        turns = [f"[{message['role']}]\n{message['content']}" for message in messages]
        prompt = messages[0]["content"] if len(messages) == 1 else "\n\n".join(turns)
        return cls(id, prompt, gold, schema, tuple(messages), max_tokens)

    @classmethod
    def after_examples(
        cls,
        id: str,  # noqa: A002 - the attribute's name
        examples: Sequence[tuple[str, str]],
        question: str,
        gold: Any,
        schema: Mapping[str, Any] | None = None,
        max_tokens: int | None = None,
    ) -> "Item":
        """An item whose question follows questions that were answered: the form is shown, not explained."""
        messages: list[Message] = []
        for asked, answered in examples:
            messages += [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]
        return cls.of_chat(id, [*messages, {"role": "user", "content": question}], gold, schema, max_tokens)


@dataclass(frozen=True, slots=True)
class Parts:
    """An answer that can be right in part: the metrics that count its right parts and all, and their share's name."""

    correct: str
    total: str
    accuracy: str


FIELDS = Parts("fields_correct", "fields_total", "field_accuracy")


@dataclass(frozen=True, slots=True)
class GradedOptions:
    """Options of a suite whose items are generated.

    Attributes:
        num_items: how many; a longer run begins with the shorter one.
        max_tokens: of an answer.
    """

    num_items: int
    max_tokens: int

    def __post_init__(self) -> None:
        if self.num_items < 0 or self.max_tokens < 1:
            raise ValueError(f"num_items={self.num_items} must be at least 0, max_tokens={self.max_tokens} at least 1")


@dataclass(frozen=True, slots=True)
class GradedSuite:
    """How answers are measured, whatever the items are.

    Attributes:
        measure: (item, output) -> the metrics of one answer; see sample.schema.json.
        primary: the right-or-wrong metric that a max_drop_pp gate judges.
        shares: right-or-wrong metrics whose share is reported, the primary one first.
        parts: of an answer that can be right in part.
        means: numeric metrics whose mean is reported; of each, less is better.
        form: item -> the JSON Schema that a constrained answer is forced into. It must not give the answer away.
    """

    measure: Callable[[Item, str], Metrics]
    primary: str
    shares: tuple[str, ...]
    parts: Parts | None = None
    means: tuple[str, ...] = ()
    form: Callable[[Item], Mapping[str, Any] | None] = attrgetter("schema")

    def generated(
        self, generate: Callable[[int, int], Sequence[Item]], *, num_items: int, max_tokens: int
    ) -> "GeneratedSuite":
        """The suite with items from a seed; see ``GeneratedSuite``."""
        return GeneratedSuite(self, generate, num_items, max_tokens)

    def ask(self, suite_run: SuiteRun, items: Sequence[Item], max_tokens: int) -> SuiteOutcome:
        """Ask the model for every item and measure the answers.

        Raises:
            OptionError: the suite is constrained, and an item has no form.
            ModelOutputError: the model's generations are not those of the requests.
        """
        samples: list[Sample] = []
        for start in range(0, len(items), suite_run.batch_items):
            batch = items[start : start + suite_run.batch_items]
            requests = [self._request(suite_run, item, max_tokens) for item in batch]
            generations = suite_run.generate(requests)
            samples += [
                self._sample(suite_run.name, item, generation)
                for item, generation in zip(batch, generations, strict=True)
            ]
            suite_run.progress(len(samples), len(items))
        return SuiteOutcome(
            samples,
            {
                "items_hash": _hash_items(items),
                "num_items": len(items),
                "options": {"num_items": len(items), "max_tokens": max_tokens}
                | ({"constrained": True} if suite_run.is_constrained else {}),
                "primary_metric": self.primary,
                "metrics": self._summarize([sample["metrics"] for sample in samples]),
                "histograms": {},
            },
        )

    def _request(self, suite_run: SuiteRun, item: Item, max_tokens: int) -> GenerationRequest:
        messages = item.messages or ({"role": "user", "content": item.prompt},)
        schema = self.require_form(suite_run.name, item) if suite_run.is_constrained else None
        return GenerationRequest(item.id, messages, item.max_tokens or max_tokens, schema=schema)

    def require_form(self, suite: str, item: Item) -> Mapping[str, Any]:
        """The form of an item that is to be forced. Raises OptionError if there is none."""
        form = self.form(item)
        if form is None:
            raise OptionError(
                f"suite {suite!r}: item {item.id!r} has no schema to enforce",
                fix="Give each item a schema, or do without constrained",
            )
        return form

    def _sample(self, suite: str, item: Item, generation: Generation) -> Sample:
        answer = self.measure(item, generation.text)
        return {
            "schema_version": SCHEMA_VERSION,
            "suite": suite,
            "id": item.id,
            "prompt_hash": generation.prompt_hash,
            "prompt": item.prompt,
            "gold": item.gold if item.gold is not None else {"schema": item.schema},
            "output": generation.text,
            "finish_reason": generation.finish_reason,
            "metrics": answer | degeneration(generation.text, generation.finish_reason) | _forcing(generation),
        }

    def _summarize(self, metrics: Sequence[Mapping[str, MetricValue]]) -> dict[str, Metric]:
        measured = [name for name in self.shares if not metrics or any(name in item for item in metrics)]
        summary = {name: share_of(name, metrics) for name in measured}
        if self.parts and (not metrics or any(item.get(self.parts.total) for item in metrics)):
            summary[self.parts.accuracy] = part_accuracy(self.parts.correct, self.parts.total, metrics)
        summary |= {name: mean_of(name, metrics) for name in (*self.means, "whitespace_run")}
        summary |= {name: share_of(name, metrics, lower_is_better=True) for name in ("truncated", "looped")}
        if any("num_forced_tokens" in item for item in metrics):
            summary["forced_token_rate"] = part_accuracy("num_forced_tokens", "num_tokens", metrics)
        if any("legal_mass" in item for item in metrics):
            summary["legal_mass"] = mean_share("legal_mass", metrics)
        return summary


@dataclass(frozen=True, slots=True)
class GeneratedSuite:
    """A graded suite whose items come from a seed.

    Attributes:
        suite: how answers are measured.
        generate: (num_items, seed) -> items; item i depends on seed and i alone.
        num_items: unless the user says otherwise.
        max_tokens: unless the user says otherwise; every right answer has fewer.
    """

    suite: GradedSuite
    generate: Callable[[int, int], Sequence[Item]]
    num_items: int
    max_tokens: int

    def __call__(self, suite_run: SuiteRun) -> SuiteOutcome:
        """Ask the model for every item.

        Raises:
            OptionError: an option is unknown or out of range.
            ModelOutputError: the model's generations are not those of the requests.
        """
        options = self.options(suite_run.name, suite_run.options)
        return self.suite.ask(suite_run, self.generate(options.num_items, suite_run.seed), options.max_tokens)

    def options(self, name: str, given: Mapping[str, Any]) -> GradedOptions:
        """The options with what the user gave; ``name`` is the suite's. Raises OptionError."""
        return parse_options(
            GradedOptions, {"num_items": self.num_items, "max_tokens": self.max_tokens} | dict(given), name
        )


def degeneration(output: str, finish_reason: str) -> Metrics:
    """What shows that a model has lost its way, whatever was asked."""
    return {
        "truncated": finish_reason == "length",
        "looped": is_looped(output),
        "whitespace_run": longest_whitespace_run(output),
    }


def _forcing(generation: Generation) -> Metrics:
    """How far the form, and not the model, wrote the answer; empty where nothing was forced or nobody tells."""
    found: Metrics = {}
    if generation.num_forced_tokens is not None:
        found |= {"num_forced_tokens": generation.num_forced_tokens, "num_tokens": generation.num_tokens}
    if generation.legal_mass is not None:
        found["legal_mass"] = generation.legal_mass
    return found


def _hash_items(items: Sequence[Item]) -> str:
    """Of everything that an item asks, before any tokenizer."""
    asked = [[item.id, item.prompt, item.gold, item.schema, list(item.messages), item.max_tokens] for item in items]
    return hashlib.sha256(json.dumps(asked, ensure_ascii=True, sort_keys=True).encode()).hexdigest()
