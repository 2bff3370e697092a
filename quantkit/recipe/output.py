"""The section ``outputs``: which files a run writes."""

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from quantkit.recipe.section import FilePath, Section, Text, Unordered, fault

UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9}
DEFAULT_SHARD_BYTES = 5 * 10**9
# fmt: off
GgufFileType = Literal[
    "F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q6_K", "Q3_K_S", "Q3_K_M", "Q3_K_L",
    "Q4_K_S", "Q4_K_M", "Q5_K_S", "Q5_K_M", "IQ4_NL", "IQ4_XS",
]
GgufTensorType = Literal[
    "F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K",
    "IQ4_NL", "IQ4_XS",
]
# fmt: on


def _to_bytes(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(B|KB|MB|GB)", value.strip(), re.IGNORECASE)
    if found is None:
        raise fault(f"{value!r} is no size; write a number with B, KB, MB or GB, such as 5GB")
    return int(float(found[1]) * UNITS[found[2].upper()])


def _positive(value: Any) -> Any:
    value = _to_bytes(value)
    if isinstance(value, int) and not isinstance(value, bool) and value < 1:
        raise fault(f"{value} bytes hold no tensor; write a size such as 5GB")
    return value


def _pattern(pattern: str) -> str:
    try:
        re.compile(pattern)
    except re.error as error:
        raise fault(f"{pattern!r} is no regular expression: {error}") from error
    return pattern


class CheckpointOutput(Section):
    """A checkpoint to write.

    Attributes:
        format: of the files.
        path: the folder.
        max_shard_size: most tensor bytes in a weight file.
        checkpoint_format: of GPTQ: ``gptq`` stores zero points less one, ``gptq_v2`` as they are.
    """

    format: Literal["compressed-tensors", "gptq", "awq"]
    path: FilePath
    max_shard_size: Annotated[int, BeforeValidator(_positive)] = DEFAULT_SHARD_BYTES
    checkpoint_format: Literal["gptq", "gptq_v2"] | None = None

    @model_validator(mode="after")
    def _check(self) -> "CheckpointOutput":
        if self.checkpoint_format is not None and self.format != "gptq":
            raise fault(f"belongs to the format gptq, not to {self.format}", "checkpoint_format")
        return self

    @property
    def format_options(self) -> dict[str, str]:
        """Options of the format."""
        return {"checkpoint_format": self.checkpoint_format} if self.checkpoint_format else {}


class GgufOverride(Section):
    """Another type for some tensors, by GGUF name; of several overrides that match a tensor the first one counts."""

    match: Annotated[Text, AfterValidator(_pattern)]
    type: GgufTensorType


class GgufOutput(Section):
    """A GGUF file to write, from the original weights and whatever ``quantization`` says.

    With a ``calibration`` section its tokens say which columns of each weight matter.

    Attributes:
        format: of the file.
        path: of the file; parts are called NAME-00001-of-00003.gguf.
        type: named file type, whose rules choose the type of each tensor.
        target_bpw: mean bits of a weight for which types are chosen instead.
        overrides: exceptions.
        error_feedback: let open columns make up for rounding errors (GPTQ).
        pretokenizer: llama.cpp's name of it, where it is not recognized.
        split_size: most bytes of a part; None for one file.
    """

    format: Literal["gguf"]
    path: FilePath
    type: GgufFileType = "Q4_K_M"
    target_bpw: Annotated[float, Field(gt=0, le=32)] | None = None
    overrides: Annotated[tuple[GgufOverride, ...], Unordered] = ()
    error_feedback: bool = False
    pretokenizer: Text | None = None
    split_size: Annotated[int, BeforeValidator(_positive)] | None = None

    @model_validator(mode="after")
    def _check(self) -> "GgufOutput":
        if self.path.suffix != ".gguf":
            raise fault(f"{self.path} is the path of a file and must end with .gguf", "path")
        return self

    @property
    def needs_calibration(self) -> str | None:
        """The key that looks at the inputs of the layers; None if there is none."""
        given = {"error_feedback": self.error_feedback, "target_bpw": self.target_bpw is not None}
        return next((key for key, is_given in given.items() if is_given), None)


Output = Annotated[CheckpointOutput | GgufOutput, Field(discriminator="format")]
