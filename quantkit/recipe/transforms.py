"""The entries of ``quantization.transforms``: how a block is rescaled before it is quantized."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from quantkit.recipe.section import Positive, Section


class Awq(Section):
    """Scale up the weight columns whose inputs are large."""

    name: Literal["awq"]
    num_ratios: Positive = 10
    clip: bool = False


class SmoothQuant(Section):
    """Move outliers of the inputs into the weights; the scale is searched, or the formula's with ``alpha``."""

    name: Literal["smoothquant"]
    alpha: Annotated[float, Field(ge=0, le=1)] | None = None


def _named(value: Any) -> Any:
    """``awq`` stands for ``{name: awq}``."""
    return {"name": value} if isinstance(value, str) else value


Transform = Annotated[Awq | SmoothQuant, Field(discriminator="name"), BeforeValidator(_named)]
