"""The sections ``calibration`` and ``quantization``: which tokens, and how weights become codes."""

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

from quantkit.recipe.section import PathText, Positive, Section, Share, Text, Unordered, fault, not_yet
from quantkit.scheme import GROUP_SIZES, PER_CHANNEL, PRESETS, QuantScheme

GroupSize = Literal["auto", "channel", 32, 64, 128]


def _pattern(pattern: str) -> str:
    try:
        re.compile(pattern)
    except re.error as error:
        raise fault(f"{pattern!r} is no regular expression: {error}") from error
    return pattern


class TextSource(Section):
    """Plain text: a file, or ``builtin`` for the text that quantkit carries."""

    kind: Literal["text"]
    path: PathText
    share: Share = 1.0


class JsonlSource(Section):
    """One JSON object a line with ``text``, or with ``messages`` for the model's chat template."""

    kind: Literal["jsonl"]
    path: PathText
    share: Share = 1.0


class DatasetSource(Section):
    """A column of a Hugging Face dataset."""

    kind: Literal["dataset"]
    name: Text
    split: Text = "train"
    column: Text = "text"
    share: Share = 1.0


Source = Annotated[TextSource | JsonlSource | DatasetSource, Field(discriminator="kind")]


class Calibration(Section):
    """Which tokens the algorithm sees: ``num_tokens`` in windows of ``window_tokens``, drawn with ``seed``."""

    sources: Annotated[tuple[Source, ...], Field(strict=False, min_length=1)]
    num_tokens: Positive = 32768
    window_tokens: Annotated[int, Field(ge=8)] = 512
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0

    @model_validator(mode="after")
    def _check(self) -> "Calibration":
        total = sum(source.share for source in self.sources)
        if abs(total - 1) > 1e-6:
            raise fault(f"the shares of the sources sum to {total:g}; they must sum to 1", "sources")
        if self.num_tokens < self.window_tokens:
            raise fault(
                f"{self.num_tokens} is less than one window of window_tokens={self.window_tokens}", "num_tokens"
            )
        return self


class Rtn(Section):
    """Round to nearest; looks at the weights only."""

    name: Literal["rtn"]


class Gptq(Section):
    """GPTQ: second-order rounding, from the inputs of each layer."""

    name: Literal["gptq"]
    damp_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.01
    block_size: Positive = 128


Algorithm = Annotated[Rtn | Gptq, Field(discriminator="name")]


class Scheme(Section):
    """Integer weights: a preset's name in the recipe, or this mapping."""

    num_bits: Literal[4]
    group_size: GroupSize | None = None
    symmetric: Literal[True] = True


class Quantization(Section):
    """What is quantized and how.

    ``scheme`` and ``group_size`` of the file are read through :attr:`group_size` and :meth:`scheme`, which unite
    the two places where a group size may stand.
    """

    given_scheme: Scheme = Field(alias="scheme")
    given_group_size: GroupSize | None = Field(default=None, alias="group_size")
    algorithm: Algorithm
    ignore: Annotated[tuple[Annotated[Text, AfterValidator(_pattern)], ...], Unordered] = ("lm_head",)
    transforms: Annotated[tuple[Any, ...], Unordered] = ()
    overrides: Annotated[tuple[Any, ...], Unordered] = ()

    @field_validator("given_scheme", mode="before")
    @classmethod
    def _preset(cls, value: Any) -> Any:
        if not isinstance(value, str):
            return value
        if value not in PRESETS:
            raise PydanticCustomError("choice", "{allowed}", {"allowed": tuple(PRESETS), "keys": ()})
        return {"num_bits": PRESETS[value].num_bits, "symmetric": PRESETS[value].symmetric}

    @field_validator("transforms", "overrides")
    @classmethod
    def _empty(cls, value: tuple[Any, ...]) -> tuple[Any, ...]:
        if value:
            raise not_yet()
        return value

    @model_validator(mode="after")
    def _check(self) -> "Quantization":
        both = {self.given_group_size, self.given_scheme.group_size} - {None}
        if len(both) > 1:
            raise fault("given twice with different values; keep one of group_size and scheme.group_size", "group_size")
        return self

    @property
    def group_size(self) -> Literal["auto"] | int:
        """Columns that share a scale; -1: one scale per output row; ``auto``: the largest that divides every layer."""
        given = self.given_group_size or self.given_scheme.group_size or "auto"
        return PER_CHANNEL if given == "channel" else given

    def scheme(self, group_size: int) -> QuantScheme:
        """The scheme with ``group_size`` columns a group (-1: per output row)."""
        if group_size not in (*GROUP_SIZES, PER_CHANNEL):
            raise ValueError(
                f"group_size={group_size}; choose from {', '.join(map(str, GROUP_SIZES))} or {PER_CHANNEL}"
            )
        return QuantScheme(self.given_scheme.num_bits, group_size, self.given_scheme.symmetric)
