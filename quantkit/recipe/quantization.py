"""The section ``quantization``: how weights become codes."""

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from quantkit.recipe.section import Positive, Section, Text, Unordered, fault
from quantkit.recipe.transforms import Transform
from quantkit.recipe.tuning import Tuning
from quantkit.scheme import GROUP_SIZES, PER_CHANNEL, PRESETS, InputScheme, QuantScheme

GroupSize = Literal["auto", "channel", 32, 64, 128]
KEEP = "none"  # the scheme of an override that leaves its layers as they are


def _pattern(pattern: str) -> str:
    try:
        re.compile(pattern)
    except re.error as error:
        raise fault(f"{pattern!r} is no regular expression: {error}") from error
    return pattern


def _preset(value: Any) -> Any:
    """A preset's name as the mapping that it stands for."""
    if not isinstance(value, str):
        return value
    if value not in PRESETS:
        raise PydanticCustomError("choice", "{allowed}", {"allowed": tuple(PRESETS), "keys": ()})
    preset = PRESETS[value]
    inputs = "none" if preset.input is None else "dynamic" if preset.input.dynamic else "static"
    return {"num_bits": preset.num_bits, "symmetric": preset.symmetric, "input": inputs}


def _preset_or_keep(value: Any) -> Any:
    if value == KEEP:
        return None
    if isinstance(value, str) and value not in PRESETS:
        raise PydanticCustomError("choice", "{allowed}", {"allowed": (*PRESETS, KEEP), "keys": ()})
    return _preset(value)


def _one_or_more(value: Any) -> Any:
    """A number stands for a list of it alone."""
    return value if isinstance(value, list) else [value]


DampFraction = Annotated[float, Field(gt=0, lt=1)]


class Rtn(Section):
    """Round to nearest; looks at the weights only, or, if it searches scales, at the size of the inputs."""

    name: Literal["rtn"]
    search: bool = False


class TargetCorrection(Section):
    """Aim at the outputs of the original model's stream, ``alpha`` of the way. It runs beside: time about doubles."""

    alpha: Annotated[float, Field(ge=0, le=1)] = 0.5
    damping: Annotated[float, Field(gt=0)] = 1.0
    skip: Annotated[tuple[Annotated[Text, AfterValidator(_pattern)], ...], Unordered] = ("down_proj",)
    apply: Literal["always", "auto"] = "auto"


class Gptq(Section):
    """GPTQ: second-order rounding, from the inputs of each layer."""

    name: Literal["gptq"]
    damp_fraction: Annotated[tuple[DampFraction, ...], BeforeValidator(_one_or_more), Unordered] = (0.01,)
    scale_search: Literal["auto", "diagonal", "pivot"] = "diagonal"
    scale_refit: bool = True
    block_size: Positive = 128
    target_correction: TargetCorrection | None = None


Algorithm = Annotated[Rtn | Gptq, Field(discriminator="name")]


class Scheme(Section):
    """Integer weights, and what happens to the layer's inputs: a preset's name in the recipe, or this mapping."""

    num_bits: Literal[4, 8]
    group_size: GroupSize | None = None
    symmetric: bool = True
    input: Literal["none", "dynamic", "static"] = "none"

    @model_validator(mode="after")
    def _check(self) -> "Scheme":
        if self.input != "none" and self.num_bits != 8:
            raise fault("8-bit inputs go with 8-bit weights; no reader multiplies them by 4-bit weights", "input")
        if self.input != "none" and not self.symmetric:
            raise fault("8-bit inputs go with symmetric weights; no engine multiplies them by asymmetric ones", "input")
        return self


class SchemeChoice(Section):
    """The keys ``scheme`` and ``group_size``, read through :attr:`group_size` and :meth:`scheme`.

    They unite the two places where a group size may stand.
    """

    given_scheme: Annotated[Scheme | None, BeforeValidator(_preset)] = Field(alias="scheme")
    given_group_size: GroupSize | None = Field(default=None, alias="group_size")

    @model_validator(mode="after")
    def _check_group_size(self) -> "SchemeChoice":
        if self.given_scheme is None:
            if self.given_group_size is not None:
                raise fault("layers that stay as they are have no groups", "group_size")
            return self
        both = {self.given_group_size, self.given_scheme.group_size} - {None}
        if len(both) > 1:
            raise fault("given twice with different values; keep one of group_size and scheme.group_size", "group_size")
        if self.given_scheme.input != "none" and both - {"auto", "channel"}:
            keys = ("group_size",) if self.given_group_size else ("scheme", "group_size")
            raise fault(f"{both.pop()} does not go with 8-bit inputs, which need one scale per channel", *keys)
        return self

    @property
    def group_size(self) -> Literal["auto"] | int:
        """Columns that share a scale; -1: one scale per output row; ``auto``: the largest that divides every layer.

        Without a word in the recipe: ``auto`` for 4 bits, one scale per row for 8. Layers with 8-bit inputs have one
        scale per row always.
        """
        scheme = self.given_scheme
        assert scheme is not None, "layers that stay as they are have no group size"
        default: GroupSize = "auto" if scheme.num_bits == 4 else "channel"
        given = self.given_group_size or scheme.group_size or default
        return PER_CHANNEL if given == "channel" or scheme.input != "none" else given

    def scheme(self, group_size: int) -> QuantScheme:
        """The scheme with ``group_size`` columns a group (-1: per output row)."""
        if group_size not in (*GROUP_SIZES, PER_CHANNEL):
            raise ValueError(
                f"group_size={group_size}; choose from {', '.join(map(str, GROUP_SIZES))} or {PER_CHANNEL}"
            )
        scheme = self.given_scheme
        assert scheme is not None, "layers that stay as they are have no scheme"
        inputs = None if scheme.input == "none" else InputScheme(dynamic=scheme.input == "dynamic")
        return QuantScheme(scheme.num_bits, group_size, scheme.symmetric, inputs)


class Override(SchemeChoice):
    """Another scheme for some layers; of several overrides that match a layer the last one counts."""

    match: Annotated[Text, AfterValidator(_pattern)]
    given_scheme: Annotated[Scheme | None, BeforeValidator(_preset_or_keep)] = Field(alias="scheme")

    @property
    def keeps(self) -> bool:
        """Whether the layers stay as they are."""
        return self.given_scheme is None


class Candidate(SchemeChoice):
    """A scheme that an allocation may give to a layer."""

    given_scheme: Annotated[Scheme, BeforeValidator(_preset)] = Field(alias="scheme")


class Experts(Section):
    """Which tokens calibrate the experts of a mixture model.

    ``routed``: those that the router sends to each, and the run stops at an expert with fewer than ``min_tokens``
    (without it: as many as it has input columns). ``all_tokens``: all of them for every expert; what a block computes
    is the same.
    """

    calibrate: Literal["routed", "all_tokens"] = "routed"
    min_tokens: Positive | None = None

    @model_validator(mode="after")
    def _check(self) -> "Experts":
        if self.calibrate == "all_tokens" and self.min_tokens is not None:
            raise fault("every expert sees all tokens; min_tokens goes with calibrate: routed", "min_tokens")
        return self


ROUTED = Experts()


def _kv_dtype(value: Any) -> Any:
    if value == "int8":
        raise fault(
            "int8 scales of keys and values cannot be stored: the readers of a checkpoint's kv_cache_scheme take 8-bit "
            "floats only; write fp8, or serve with kv_cache_dtype int8, which finds its scales while it runs"
        )
    return value


class KVCache(Section):
    """Static scales for the keys and values of each layer, found by calibration and stored with the weights."""

    dtype: Annotated[Literal["fp8"], BeforeValidator(_kv_dtype)]


class Quantization(SchemeChoice):
    """What is quantized and how.

    With ``target_bits`` (mean stored bits of a quantized weight, scales included) or ``target_bytes`` (tensor bytes of
    the first output) the scheme of every layer without an override is chosen among ``candidates``, so that the model's
    distance to the original is least at that size. Without ``candidates`` these are the recipe's scheme at every group
    size, and 8-bit weights.
    """

    given_scheme: Annotated[Scheme, BeforeValidator(_preset)] = Field(alias="scheme")
    algorithm: Algorithm
    ignore: Annotated[tuple[Annotated[Text, AfterValidator(_pattern)], ...], Unordered] = ("lm_head",)
    transforms: Annotated[tuple[Transform, ...], Unordered] = ()
    target_bits: Annotated[float, Field(gt=0, le=16)] | None = None
    target_bytes: Positive | None = None
    candidates: Annotated[tuple[Candidate, ...], Unordered] | None = None
    tuning: Tuning | None = None
    input_observer: Literal["minmax", "percentile", "mse"] = "minmax"
    experts: Experts = ROUTED
    kv_cache: KVCache | None = None
    overrides: Annotated[tuple[Override, ...], Unordered] = ()

    @model_validator(mode="after")
    def _check_correction(self) -> "Quantization":
        corrects = self.algorithm.name == "gptq" and self.algorithm.target_correction is not None
        if corrects and any(transform.name == "awq" and transform.clip for transform in self.transforms):
            raise fault(
                "does not go with awq's clip, which changes the weights that the original's stream runs through",
                *("algorithm", "target_correction"),
            )
        return self

    @model_validator(mode="after")
    def _check_transforms(self) -> "Quantization":
        names = [transform.name for transform in self.transforms]
        for number, name in enumerate(names):
            if name in names[:number]:
                raise fault(f"the transform {name} stands above already", "transforms", number)
        return self

    @model_validator(mode="after")
    def _check_reround(self) -> "Quantization":
        if self.tuning is not None and self.tuning.reround and self.transforms:
            raise fault(
                f"rounds the original weights, whose columns the transform {self.transforms[0].name} has rescaled",
                *("tuning", "reround"),
            )
        return self

    @model_validator(mode="after")
    def _check_kv_cache(self) -> "Quantization":
        if self.kv_cache is not None and self.tuning is not None:
            raise fault(
                "does not go with tuning, which changes keys and values after their scales are found", "kv_cache"
            )
        return self

    @model_validator(mode="after")
    def _check_target(self) -> "Quantization":
        if self.target_bits is not None and self.target_bytes is not None:
            raise fault("give target_bits or target_bytes, not both", "target_bytes")
        if not self.has_target:
            if self.candidates is not None:
                raise fault("candidates are chosen among for a size; give target_bits or target_bytes", "candidates")
            return self
        if self.candidates is not None and len(self.candidates) < 2:
            raise fault("nothing to choose among; give at least two", "candidates")
        for number, candidate in enumerate(self.candidates or (self,)):
            scheme = candidate.given_scheme
            assert scheme is not None, "a candidate quantizes"
            if scheme.input != "none":
                keys = ("candidates", number, "scheme") if self.candidates else ("scheme",)
                raise fault("an allocation for a size chooses among schemes with 16-bit inputs", *keys)
        return self

    @property
    def has_target(self) -> bool:
        """Whether the schemes are chosen for a size."""
        return self.target_bits is not None or self.target_bytes is not None

    @property
    def choices(self) -> dict[tuple[str | int, ...], SchemeChoice]:
        """Every choice of a scheme that quantizes, by its place in the section."""
        choices: dict[tuple[str | int, ...], SchemeChoice] = {(): self}
        choices |= {("overrides", i): override for i, override in enumerate(self.overrides) if not override.keeps}
        return choices

    @property
    def needs_calibration(self) -> str | None:
        """What of the section looks at the layers' inputs; None if nothing does."""
        if self.algorithm.name == "gptq":
            return "the algorithm gptq"
        if self.algorithm.search:
            return "the algorithm rtn with search"
        if self.has_target:
            return "a target size"
        if self.kv_cache is not None:
            return "kv_cache"
        if self.transforms:
            return f"the transform {self.transforms[0].name}"
        return "tuning without sources of its own" if self.tuning is not None and self.tuning.sources is None else None
