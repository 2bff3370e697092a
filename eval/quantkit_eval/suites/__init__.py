"""What a model can be asked: each suite generates its items from a seed, asks the model and measures the answers.

A suite is one module with a function ``run(SuiteRun) -> SuiteOutcome``, and a line in the table below. Those with right
and wrong answers are ``GradedSuite``s and share how they ask and summarise; ``nll`` has no answers and does without.
"""

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar, cast

from quantkit_eval.answer_log import AnswerLog
from quantkit_eval.errors import OptionError
from quantkit_eval.protocol import Generation, GenerationRequest, Model, check_generations
from quantkit_eval.record_types import Sample, SuiteRecord

SUITES = {  # name in a recipe -> "module:function"; imported on first use
    "extract": "quantkit_eval.suites.extract:run",
    "schema": "quantkit_eval.suites.schema:run",
    "tools": "quantkit_eval.suites.tools:run",
    "arith": "quantkit_eval.suites.arith:run",
    "needle": "quantkit_eval.suites.needle:run",
    "scripts": "quantkit_eval.suites.scripts:run",
    "instructions": "quantkit_eval.suites.instructions:run",
    "nll": "quantkit_eval.suites.nll:run",
}
CONSTRAINED = "+constrained"  # ends the name of a suite whose answers are forced into the form of each item
CONSTRAINABLE = ("extract", "schema", "tools", "arith")  # what can be so; and a user's suite whose lines have a schema
KINDS = {  # value of the option ``kind`` -> the same, under a name of its own
    "file": "quantkit_eval.suites.file:run",
    "lm-eval": "quantkit_eval.suites.lm_eval_task:run",
}
BATCH_ITEMS = 64  # items handed to the model at once: enough for its batching, few enough for a progress bar

Progress = Callable[[str, int, int], None]  # suite, items done, items in all
Options = TypeVar("Options")


@dataclass(frozen=True, slots=True)
class SuiteRun:
    """What a suite is given.

    Attributes:
        name: of the suite in the records.
        model: the model under evaluation.
        options: of the suite, as the user gave them; ``parse_options`` checks them.
        seed: of the items; equal seeds give equal items.
        folder: where the suite may leave files of its own beside the records.
        reference: the folder of the baseline's records or its nll.safetensors; None if this is the baseline.
        progress: called after each batch with the items done and the items in all.
        batch_items: items handed to the model at once.
        answers: of an evaluation that may be gone on with; None keeps none.
    """

    name: str
    model: Model
    options: Mapping[str, Any]
    seed: int
    folder: Path
    reference: Path | None
    progress: Callable[[int, int], None]
    batch_items: int = BATCH_ITEMS
    answers: AnswerLog | None = None

    @property
    def is_constrained(self) -> bool:
        """Whether answers are forced into the form that their items ask for."""
        return self.name.endswith(CONSTRAINED)

    def generate(self, requests: Sequence[GenerationRequest]) -> list[Generation]:
        """The model's answers, or those that an earlier evaluation got.

        Raises:
            ModelOutputError: the model's generations are not those of the requests.
            TargetError: a server failed.
        """
        if self.answers is not None:
            return self.answers.generate(self.model, requests)
        generations = self.model.generate(requests)
        check_generations(requests, generations)
        return generations


@dataclass(frozen=True, slots=True)
class SuiteOutcome:
    """What a suite found: one sample an item, and the summary for result.json."""

    samples: list[Sample]
    record: SuiteRecord


Suite = Callable[[SuiteRun], SuiteOutcome]


def load_suite(name: str, kind: str | None = None) -> Suite:
    """The suite of that name, or the one of a kind under a name of the user's choice.

    Args:
        name: of the suite; with ``CONSTRAINED`` at its end, the same with answers that are forced into their form.
        kind: of a suite of the user's.

    Raises:
        OptionError: there is none, it cannot be constrained, or the user's name is taken.
    """
    is_constrained, name = name.endswith(CONSTRAINED), name.removesuffix(CONSTRAINED)
    if kind is None and name not in SUITES:
        raise OptionError(f"unknown suite {name!r}", fix=f"Choose from {', '.join(SUITES)}")
    if kind is not None and name in (*SUITES, "throughput"):
        raise OptionError(f"the name {name!r} of a suite of kind {kind!r} is taken", fix="Choose another name")
    if kind is not None and kind not in KINDS:
        raise OptionError(f"suite {name!r} is of unknown kind {kind!r}", fix=f"Choose from {', '.join(KINDS)}")
    if is_constrained and kind != "file" and name not in CONSTRAINABLE:
        raise OptionError(
            f"suite {name!r} asks for no JSON that could be enforced", fix=f"Choose from {', '.join(CONSTRAINABLE)}"
        )
    module, _, function = (SUITES[name] if kind is None else KINDS[kind]).partition(":")
    return cast(Suite, getattr(importlib.import_module(module), function))


def with_constrained(suites: Mapping[str, Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """The suites, and after each that asks for JSON the same one constrained, so that both stand side by side.

    Args:
        suites: name -> options, as ``evaluate`` takes them; a user's suite counts as one that asks for JSON.

    Raises:
        OptionError: there is no such suite.
    """
    found: dict[str, Mapping[str, Any]] = {}
    for name, options in suites.items():
        found[name] = options
        if name in CONSTRAINABLE or options.get("kind") == "file":
            found[name.removesuffix(CONSTRAINED) + CONSTRAINED] = options
    if len(found) == len(suites):
        raise OptionError(
            f"no suite of {', '.join(suites)} can be constrained", fix=f"Add one of {', '.join(CONSTRAINABLE)}"
        )
    return found


def parse_options(kind: type[Options], options: Mapping[str, Any], suite: str) -> Options:
    """Fill a suite's options dataclass; ``__post_init__`` of the dataclass checks ranges with ValueError.

    Raises:
        OptionError: an unknown option, a wrong type or a value out of range.
    """
    types = {field.name: field.type for field in fields(cast(Any, kind))}
    for name, value in options.items():
        if name not in types:
            raise OptionError(f"suite {suite!r} has no option {name!r}", fix=f"Choose from {', '.join(types)}")
        expected = cast(Any, types[name])
        if not isinstance(value, expected) or (isinstance(value, bool) and expected is not bool):
            words = getattr(expected, "__name__", str(expected))
            raise OptionError(f"option {name!r} of suite {suite!r} must be {words}, not {value!r}")
    try:
        return kind(**options)
    except ValueError as error:
        raise OptionError(f"suite {suite!r}: {error}") from None
