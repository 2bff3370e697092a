"""The sections ``gates`` and ``report``: what is measured, how much worse it may be, and where that is written."""

from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import Discriminator, Field, Tag, field_validator, model_validator
from pydantic_core import PydanticCustomError

from quantkit.recipe.section import FilePath, PathText, Positive, Section, Text, fault

# quantkit_eval.suites.SUITES, which would import torch
BuiltinSuite = Literal["extract", "schema", "tools", "arith", "needle", "scripts", "instructions", "nll"]
ConstrainableSuite = Literal["extract", "schema", "tools", "arith"]  # quantkit_eval.suites.CONSTRAINABLE
CONSTRAINED = "+constrained"  # quantkit_eval.suites.CONSTRAINED
TAKEN_NAMES = (*get_args(BuiltinSuite), "throughput")
ThroughputBatch = Literal["decode_batch_1", "decode_batch_16"]


class FileSuite(Section):
    """The user's own prompts, one JSON object a line; `quantkit_eval.suites.file` says what a line holds."""

    kind: Literal["file"]
    path: PathText
    name: Text
    max_tokens: Positive = 256
    constrained: bool = False

    @field_validator("name")
    @classmethod
    def _free(cls, name: str) -> str:
        if name in TAKEN_NAMES:
            raise fault(f"{name!r} is the name of a built-in suite or of a measurement; choose another name")
        if name.endswith(CONSTRAINED):
            raise fault(f"{name!r} is the name of a constrained suite; choose another name, and constrained: true")
        return name


class ConstrainedSuite(Section):
    """A built-in suite whose answers are forced into the form of each item, beside or instead of the free one."""

    name: ConstrainableSuite
    constrained: Literal[True]


class TextSuite(Section):
    """The built-in suite ``nll`` on a text of the user's; lines with ``<|document|>`` alone separate its documents."""

    name: Literal["nll"]
    path: PathText


class LmEvalSuite(Section):
    """A task or group of lm-eval; `quantkit_eval.suites.lm_eval_task` says what the keys mean."""

    kind: Literal["lm-eval"]
    task: Text
    name: Text | None = None
    num_fewshot: Annotated[int, Field(ge=0)] | None = None
    chat_template: bool = False
    metric: Text | None = None
    include_path: PathText | None = None

    @field_validator("task", "name")
    @classmethod
    def _free(cls, name: str | None) -> str | None:
        if name in TAKEN_NAMES or (name or "").endswith(CONSTRAINED):
            raise fault(f"{name!r} is the name of a built-in suite or of a measurement; choose another name")
        return name


def _kind(suite: Any) -> str:
    if isinstance(suite, LmEvalSuite) or (isinstance(suite, dict) and suite.get("kind") == "lm-eval"):
        return "lm-eval"
    if isinstance(suite, dict):
        if "kind" in suite:
            return "file"
        if suite.get("name") == "nll":
            return "text"
        return "constrained" if "constrained" in suite and "path" not in suite else "file"
    if isinstance(suite, FileSuite):
        return "file"
    if isinstance(suite, TextSuite):
        return "text"
    return "constrained" if isinstance(suite, ConstrainedSuite) else "name"


Suite = Annotated[
    Annotated[BuiltinSuite, Tag("name")]
    | Annotated[FileSuite, Tag("file")]
    | Annotated[ConstrainedSuite, Tag("constrained")]
    | Annotated[TextSuite, Tag("text")]
    | Annotated[LmEvalSuite, Tag("lm-eval")],
    Discriminator(_kind),
]


def _name(suite: Any) -> str:
    """The name of a suite in the records."""
    if isinstance(suite, str):
        return suite
    if isinstance(suite, LmEvalSuite):
        return suite.name or suite.task
    if isinstance(suite, TextSuite):
        return suite.name
    return str(suite.name) + CONSTRAINED * suite.constrained


class Gates(Section):
    """What is measured (``suites``) and how much worse it may be; what has no limit is reported, not judged."""

    suites: Annotated[tuple[Suite, ...], Field(strict=False, min_length=1)] = ("extract", "nll")
    max_drop_pp: dict[Text, Annotated[float, Field(gt=0, lt=100)]] = Field(default_factory=dict)
    max_kl_mean_nats: Annotated[float, Field(gt=0)] | None = None
    min_throughput_ratio: dict[ThroughputBatch, Annotated[float, Field(gt=0)]] = Field(default_factory=dict)
    num_items: dict[Text, Positive] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _check(self) -> "Gates":
        names = self.suite_names
        if len(set(names)) < len(names):
            raise fault("a suite stands here twice", "suites")
        graded = tuple(name for name in names if name != "nll")
        for key, given, allowed in (("max_drop_pp", self.max_drop_pp, graded), ("num_items", self.num_items, names)):
            for suite in given:
                if suite == "nll" and key == "max_drop_pp":
                    raise fault("nll has no right and wrong answers; its gate is max_kl_mean_nats", key, suite)
                if suite in allowed:
                    continue
                if suite.removesuffix(CONSTRAINED) in get_args(BuiltinSuite):
                    raise fault(f"the suite {suite} is not in gates.suites ({', '.join(names)})", key, suite)
                raise PydanticCustomError("choice", "{allowed}", {"allowed": allowed, "keys": (key, suite)})
        if self.max_kl_mean_nats is not None and "nll" not in names:
            raise fault(f"needs the suite nll in gates.suites ({', '.join(names)})", "max_kl_mean_nats")
        return self

    @property
    def judges_quality(self) -> bool:
        """Whether a limit on right answers or on divergence is set."""
        return bool(self.max_drop_pp) or self.max_kl_mean_nats is not None

    @property
    def suite_names(self) -> tuple[str, ...]:
        """The suites by name, in the order of the recipe; the name of a constrained one says so."""
        return tuple(map(_name, self.suites))

    @property
    def files(self) -> dict[str, str]:
        """Suite -> the file of the user's that it reads."""
        return {_name(suite): suite.path for suite in self.suites if isinstance(suite, FileSuite | TextSuite)}

    @property
    def suite_options(self) -> dict[str, dict[str, Any]]:
        """Suite -> its options, as ``quantkit_eval.evaluate.evaluate`` takes them."""
        options: dict[str, dict[str, Any]] = {}
        for name, suite in zip(self.suite_names, self.suites, strict=True):
            options[name] = {}
            if isinstance(suite, FileSuite):
                options[name] = suite.model_dump(exclude={"name", "constrained"})
            elif isinstance(suite, TextSuite):
                options[name] = {"text_path": suite.path}
            elif isinstance(suite, LmEvalSuite):
                options[name] = suite.model_dump(exclude={"name"}, exclude_none=True)
            if name in self.num_items:
                options[name]["max_windows" if name == "nll" else "num_items"] = self.num_items[name]
        return options

    @property
    def limits(self) -> dict[str, Any]:
        """What is judged, as ``quantkit_eval.compare.compare`` takes it."""
        return self.model_dump(exclude={"num_items"}) | {"suites": self.suite_names}


class Report(Section):
    """Files that ``quantkit run`` writes."""

    html: FilePath | None = None
    junit: FilePath | None = None
    markdown: FilePath | None = None

    @property
    def paths(self) -> dict[str, Path]:
        """The given ones, by their key."""
        given = {"html": self.html, "junit": self.junit, "markdown": self.markdown}
        return {key: path for key, path in given.items() if path is not None}
