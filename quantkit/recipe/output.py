"""The section ``outputs``: which files a run writes."""

import re
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, model_validator

from quantkit.recipe.section import FilePath, Section, fault

UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9}
DEFAULT_SHARD_BYTES = 5 * 10**9


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


class Output(Section):
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
    def _check(self) -> "Output":
        if self.checkpoint_format is not None and self.format != "gptq":
            raise fault(f"belongs to the format gptq, not to {self.format}", "checkpoint_format")
        return self

    @property
    def format_options(self) -> dict[str, str]:
        """Options of the format."""
        return {"checkpoint_format": self.checkpoint_format} if self.checkpoint_format else {}
