"""A task (or group of tasks) of lm-eval as a suite: ``{kind: lm-eval, task: hellaswag}``.

lm-eval renders, asks and scores; here its items become samples that are paired and judged like any other. An item is
right by one of its metrics that is 0 or 1 (``metric``, or the first of ``PREFERRED`` that it has).
"""

import hashlib
import importlib.util
import json
import logging
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from quantkit_eval.errors import NotOfferedError, OptionError
from quantkit_eval.protocol import TextModel, hash_token_ids
from quantkit_eval.record_types import Metric, MetricValue, Sample
from quantkit_eval.records import SCHEMA_VERSION
from quantkit_eval.suites import SuiteOutcome, SuiteRun, parse_options
from quantkit_eval.suites.shares import share_of

PREFERRED = ("exact_match", "acc_norm", "acc")
SEED = 1234  # of the choice of examples, as lm-eval has it
PREFIX = "lm_eval."  # of its metrics in samples
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LmEvalOptions:
    """Options of the suite.

    Attributes:
        kind: ``lm-eval``.
        task: name of a task or group.
        num_items: the first so many of each task; 0 takes all.
        num_fewshot: examples in each prompt; None is what the task says.
        chat_template: put prompts into the model's chat template.
        metric: what makes an item right; None takes the first of ``PREFERRED``.
        include_path: folder with tasks of the user's own.
    """

    kind: str
    task: str
    num_items: int = 0
    num_fewshot: int | None = None
    chat_template: bool = False
    metric: str | None = None
    include_path: str | None = None

    def __post_init__(self) -> None:
        if self.num_items < 0 or (self.num_fewshot or 0) < 0:
            raise ValueError(f"num_items={self.num_items} and num_fewshot={self.num_fewshot} must be at least 0")


@dataclass(frozen=True, slots=True)
class _Answered:
    """What lm-eval found: of each item its task and what it logged, and the results of all tasks."""

    items: Sequence[tuple[str, Mapping[str, Any]]]
    results: Mapping[str, Any]


def check_task(name: str, options: Mapping[str, Any]) -> LmEvalOptions:
    """The options of a suite, before any model is loaded. Raises OptionError: they are wrong, or lm-eval is missing."""
    parsed = parse_options(LmEvalOptions, options, name)
    if importlib.util.find_spec("lm_eval") is None:
        raise OptionError(f"suite {name!r} is a task of lm-eval, which is not installed", fix="pip install lm-eval")
    return parsed


def run(suite_run: SuiteRun) -> SuiteOutcome:
    """Let lm-eval ask the model.

    Raises:
        OptionError: an option is wrong, lm-eval is missing or knows no such task, or the metric is none of its own.
        NotOfferedError: the model takes chats only.
    """
    options = check_task(suite_run.name, suite_run.options)
    if not isinstance(suite_run.model, TextModel):
        raise NotOfferedError(
            f"{options.task} of lm-eval needs a model that runs here; a server is asked by lm-eval's own command, "
            "lm_eval --model local-completions"
        )
    from quantkit_eval.lm_eval_adapter import ModelLM

    lm = ModelLM(suite_run.model, suite_run.progress)
    found = _ask(lm, options)
    if lm.num_shortened:
        logger.warning(
            "%s: %d prompts did not fit into the model's context and were cut", options.task, lm.num_shortened
        )
    metric = _primary(found.items, options)
    samples = [_sample(suite_run.name, task, item, metric, lm) for task, item in found.items]
    return SuiteOutcome(
        samples,
        {
            "items_hash": _hash_items(found.items),
            "num_items": len(samples),
            "options": {
                "task": options.task,
                "num_fewshot": options.num_fewshot,
                "chat_template": options.chat_template,
                "right_by": metric,
                "versions": found.results["versions"],
            },
            "primary_metric": "exact" if metric else None,
            "metrics": _summarize(samples, found, metric),
            "histograms": {},
        },
    )


def _ask(lm: Any, options: LmEvalOptions) -> _Answered:
    """Run lm-eval as its ``simple_evaluate`` does, without its bootstrap (intervals are ours) and its look at pip."""
    from lm_eval.evaluator import evaluate

    manager = _find_task(options.task, options.include_path)
    loaded = manager.load([options.task])
    for task in loaded["tasks"].values():
        own = task.get_config("num_fewshot")  # 0 is a task that takes no examples
        if own is None or (own and options.num_fewshot is not None):
            task.set_config(key="num_fewshot", value=options.num_fewshot or 0)
        task.set_fewshot_seed(seed=SEED)
    random.seed(0)  # some tasks shuffle when they load; the values are lm-eval's
    np.random.seed(SEED)
    results = evaluate(
        lm,
        loaded,
        limit=options.num_items or None,
        apply_chat_template=options.chat_template,
        fewshot_as_multiturn=options.chat_template,
        bootstrap_iters=0,
    )
    assert results is not None, "one process has all results"
    items: list[tuple[str, Mapping[str, Any]]] = []
    for task, logged in sorted(results["samples"].items()):
        first = logged[0]["filter"] if logged else None  # of several ways to read an answer, the task's first
        items += [(task, item) for item in sorted(logged, key=_place) if item["filter"] == first]
    if not items:
        raise OptionError(f"task {options.task!r} of lm-eval has no item")
    return _Answered(items, results)


def _find_task(task: str, include_path: str | None) -> Any:
    """What loads the task: of the user's folder alone if it is there, for lm-eval reads thousands of files for its own.

    Raises:
        OptionError: there is no such task.
    """
    if include_path is not None:
        if not Path(include_path).is_dir():
            raise OptionError(f"include_path={include_path!r} is no folder")
        manager = _task_manager(include_path, has_defaults=False)
        if task in manager.all_tasks:
            return manager
    manager = _task_manager(include_path, has_defaults=True)
    if task not in manager.all_tasks:
        where = f", nor does {include_path}" if include_path else ""
        raise OptionError(f"lm-eval has no task {task!r}{where}", fix="lm_eval ls tasks lists what it has")
    return manager


@cache
def _task_manager(include_path: str | None, *, has_defaults: bool) -> Any:
    from lm_eval.tasks import TaskManager

    return TaskManager(include_path=include_path, include_defaults=has_defaults)


def _place(item: Mapping[str, Any]) -> int:
    return int(item["doc_id"])


def _primary(items: Sequence[tuple[str, Mapping[str, Any]]], options: LmEvalOptions) -> str | None:
    """The metric that says whether an item is right; None if no metric of the task can.

    Raises:
        OptionError: the one that is asked for is none of them.
    """
    names = dict.fromkeys(chain.from_iterable(item["metrics"] for _, item in items))
    graded = [name for name in names if all(_is_graded(item.get(name)) for _, item in items)]
    if options.metric is None:
        return next((name for name in (*PREFERRED, *graded) if name in graded), None)
    if options.metric not in graded:
        raise OptionError(
            f"metric {options.metric!r} says of no item of {options.task!r} whether it is right",
            fix=f"Choose from {', '.join(graded)}" if graded else "Leave it out: the task has only numbers",
        )
    return options.metric


def _is_graded(value: Any) -> bool:
    return isinstance(value, bool | int | float) and float(value) in (0.0, 1.0)


def _sample(suite: str, task: str, item: Mapping[str, Any], metric: str | None, lm: Any) -> Sample:
    arguments = [tuple(map(_text, arguments)) for arguments in item["arguments"]]
    token_ids = [token for texts in arguments for text in texts for token in (-1, *lm.tok_encode(text))]
    metrics: dict[str, MetricValue] = {"truncated": arguments[0][0] in lm.cut_off}
    if metric:
        metrics["exact"] = bool(item[metric])
    for name in item["metrics"]:
        number = _number(item[name])
        if number is not None:
            metrics[PREFIX + name] = number
    return {
        "schema_version": SCHEMA_VERSION,
        "suite": suite,
        "id": f"{task}-{_place(item):05d}",
        "prompt_hash": hash_token_ids(token_ids),
        "prompt": arguments[0][0],
        "gold": json.loads(json.dumps(item["target"], default=str)),
        "output": _output(item, arguments),
        "finish_reason": "length" if metrics["truncated"] else "stop",
        "metrics": metrics,
    }


def _text(argument: Any) -> str:
    return argument if isinstance(argument, str) else json.dumps(argument, sort_keys=True, default=str)


def _number(value: Any) -> float | None:
    """A metric of an item as a number; of a perplexity, which is a pair, the log-likelihood a unit."""
    if isinstance(value, tuple | list) and len(value) == 2:
        return float(value[0]) / float(value[1]) if value[1] else None
    return float(value) if isinstance(value, bool | int | float) else None


def _output(item: Mapping[str, Any], arguments: Sequence[Sequence[str]]) -> str:
    """The text that was generated; of several continuations, the most likely one; of a text that was scored, none."""
    answers = [found[0] for found in item["resps"]]
    if isinstance(answers[0], str):
        return answers[0]
    if len(answers) == 1 or not isinstance(answers[0], tuple | list):
        return ""
    best = max(range(len(answers)), key=lambda index: float(answers[index][0]))
    return arguments[best][-1]


def _summarize(samples: Sequence[Sample], found: _Answered, metric: str | None) -> dict[str, Metric]:
    """The share of right items, and of a single task what lm-eval itself makes of its metrics."""
    measured = [sample["metrics"] for sample in samples]
    summary = {"exact": share_of("exact", measured)} if metric else {}
    tasks = {task for task, _ in found.items}
    if len(tasks) > 1:
        return summary or {"truncated": share_of("truncated", measured, lower_is_better=True)}
    (task,) = tasks
    chosen = found.items[0][1]["filter"]
    for key, value in found.results["results"][task].items():
        name, _, filter_name = key.partition(",")
        if filter_name != chosen or name.endswith("_stderr") or not isinstance(value, int | float):
            continue
        better = found.results["higher_is_better"].get(task, {}).get(name)
        summary[PREFIX + name] = {
            "value": float(value),
            "n": len(samples),
            "interval": None,
            "confidence": None,
            "method": "as lm-eval aggregates it",
            "unit": "number",
            "direction": "lower_is_better" if better is False else "higher_is_better",
        }
    return summary | {"truncated": share_of("truncated", measured, lower_is_better=True)}


def _hash_items(items: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    """Of documents and targets as lm-eval hashes them, before any template or tokenizer."""
    content = [[task, item["doc_id"], item["doc_hash"], item["target_hash"]] for task, item in items]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()
