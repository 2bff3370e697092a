"""The sections ``gates`` and ``report``: what is measured, how much worse it may be, and where that is written."""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from quantkit.recipe.section import FilePath, Positive, Section, fault

Suite = Literal["extract", "nll"]
AccuracySuite = Literal["extract"]
ThroughputBatch = Literal["decode_batch_1", "decode_batch_16"]
ITEM_OPTIONS = {"extract": "num_items", "nll": "max_windows"}  # the suite's own name for its number of items


class Gates(Section):
    """What is measured (``suites``) and how much worse it may be; what has no limit is reported, not judged."""

    suites: Annotated[tuple[Suite, ...], Field(strict=False, min_length=1)] = ("extract", "nll")
    max_drop_pp: dict[AccuracySuite, Annotated[float, Field(gt=0, lt=100)]] = Field(default_factory=dict)
    max_kl_mean_nats: Annotated[float, Field(gt=0)] | None = None
    min_throughput_ratio: dict[ThroughputBatch, Annotated[float, Field(gt=0)]] = Field(default_factory=dict)
    num_items: dict[Suite, Positive] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _check(self) -> "Gates":
        if len(set(self.suites)) < len(self.suites):
            raise fault("a suite stands here twice", "suites")
        for key, given in (("max_drop_pp", self.max_drop_pp), ("num_items", self.num_items)):
            for suite in given:
                if suite not in self.suites:
                    raise fault(f"the suite {suite} is not in gates.suites ({', '.join(self.suites)})", key, suite)
        if self.max_kl_mean_nats is not None and "nll" not in self.suites:
            raise fault(f"needs the suite nll in gates.suites ({', '.join(self.suites)})", "max_kl_mean_nats")
        return self

    @property
    def suite_options(self) -> dict[str, dict[str, int]]:
        """Suite -> its options, as ``quantkit_eval.evaluate.evaluate`` takes them."""
        return {
            suite: {ITEM_OPTIONS[suite]: self.num_items[suite]} if suite in self.num_items else {}
            for suite in self.suites
        }

    @property
    def limits(self) -> dict[str, Any]:
        """What is judged, as ``quantkit_eval.compare.compare`` takes it."""
        return self.model_dump(exclude={"num_items"})


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
