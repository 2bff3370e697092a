"""The subsection ``quantization.tuning``: what is stored as a float is tuned against the original."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from quantkit.recipe.calibration import Source
from quantkit.recipe.section import Positive, Section, Unordered, fault

LearningRate = Annotated[float, Field(gt=0, le=0.1)]


class Tuning(Section):
    """KL tuning: the quantized model is moved towards the original's next-token distribution.

    ``steps`` of ``tokens_per_step`` tokens move scales and small parameters (norms, biases) by ``learning_rate``
    relative to their size; with ``codes: tuned`` the integer codes may move too, each by one step at most, at
    ``code_learning_rate``. With ``reround`` the codes are then rounded anew to the tuned scales, with error feedback,
    and tuned once more. Without ``sources`` the calibration's sources are read.
    """

    steps: Positive = 120
    tokens_per_step: Annotated[int, Field(ge=64)] = 1024
    learning_rate: LearningRate = 1e-3
    codes: Literal["frozen", "tuned"] = "frozen"
    code_learning_rate: LearningRate = 0.02
    reround: bool = False
    sources: Annotated[tuple[Source, ...], Unordered, Field(min_length=1)] | None = None
    checkpointing: bool = True
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0

    @model_validator(mode="after")
    def _check(self) -> "Tuning":
        total = sum(source.share for source in self.sources or ())
        if self.sources is not None and abs(total - 1) > 1e-6:
            raise fault(f"the shares of the sources sum to {total:g}; they must sum to 1", "sources")
        return self
