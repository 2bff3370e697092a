"""What a recipe may say, as frozen pydantic models; the field names are the keys of the file.

A key of the recipe's full contract that is not built yet is listed in ``NOT_YET_KEYS`` or ``NOT_YET_VALUES``: it is
recognised and refused, never ignored. Building it means taking it off the list.
"""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, PrivateAttr, model_validator
from pydantic_core import PydanticCustomError

from quantkit.errors import RecipeError
from quantkit.recipe.document import KeyPath
from quantkit.recipe.gates import Gates, Report
from quantkit.recipe.quantization import Calibration, Quantization
from quantkit.recipe.section import FilePath, Section, Text, Unordered, fault, not_yet

# Key paths with [] for any index. The contract has them, quantkit does not yet.
NOT_YET_KEYS = frozenset(
    {
        "calibration.sources[].seed_prompts",
        "quantization.overrides",
        "quantization.target_bits",
        "quantization.target_bytes",
        "quantization.transforms",
        "quantization.tuning",
        "outputs[].type",
    }
)
LATER_SUITES = frozenset({"schema", "tools", "arith", "scripts", "needle"})
NOT_YET_VALUES: dict[str, frozenset[Any]] = {
    "calibration.sources[].kind": frozenset({"self_generated"}),
    "quantization.scheme": frozenset({"W4A16_ASYM", "W8A16", "W8A8", "W8A8_STATIC", "FP8_DYNAMIC", "NVFP4"}),
    "quantization.scheme.num_bits": frozenset({2, 3, 5, 6, 8}),
    "quantization.scheme.symmetric": frozenset({False}),
    "outputs[].format": frozenset({"gguf", "gptq", "awq"}),
    "gates.suites[]": LATER_SUITES,
    "gates.max_drop_pp{}": LATER_SUITES,  # {}: the keys of this mapping
    "gates.num_items{}": LATER_SUITES,
}


def _whole_number(value: Any) -> Any:
    """Literal[1] takes true and 1.0 for 1, because they are equal in Python."""
    if type(value) is not int:
        raise PydanticCustomError("choice", "{allowed}", {"allowed": ("1",), "keys": ()})
    return value


class Output(Section):
    """A checkpoint to write."""

    format: Literal["compressed-tensors"]
    path: FilePath


class Recipe(Section):
    """One model, how to quantize it, and what it must still be able to do.

    Without ``quantization`` the model is compared with itself (an A/A run): nothing is written but records and reports.
    """

    version: Annotated[Literal[1], BeforeValidator(_whole_number)]
    model: Text | None = None
    calibration: Calibration | None = None
    quantization: Quantization | None = None
    outputs: Annotated[tuple[Output, ...], Unordered] = ()
    gates: Gates = Gates()
    report: Report = Report()
    _text: str = PrivateAttr("")
    _sha256: str = PrivateAttr("")

    @model_validator(mode="after")
    def _check(self) -> "Recipe":
        if self.quantization is None:
            for key in ("calibration", "outputs"):
                if getattr(self, key):
                    raise fault("without quantization the model is compared with itself, and this has no meaning", key)
        else:
            if not self.outputs:
                raise fault("missing; write [{format: compressed-tensors, path: FOLDER}]", "outputs")
            if len(self.outputs) > 1:
                raise not_yet("outputs", 1)
            if self.quantization.algorithm.name == "gptq" and self.calibration is None:
                raise fault("missing; the algorithm gptq needs it", "calibration")
        taken: dict[Path, KeyPath] = {output.path: ("outputs", 0, "path") for output in self.outputs}
        for key, path in self.report.paths.items():
            if path in taken:
                raise fault(f"{path} is also the path of another file of this recipe", "report", key)
            taken[path] = ("report", key)
        return self

    @property
    def text(self) -> str:
        """The file as it was read."""
        return self._text

    @property
    def sha256(self) -> str:
        """Hexadecimal SHA-256 of the text in UTF-8."""
        return self._sha256

    @property
    def is_self_comparison(self) -> bool:
        """Whether this is an A/A run: no quantization, the model against itself."""
        return self.quantization is None

    def with_model(self, model: str | None) -> "Recipe":
        """The same recipe for another model; None keeps the recipe's own."""
        return self if model is None else self.model_copy(update={"model": model})

    def require_quantization(self) -> Quantization:
        """The part on quantization.

        Raises:
            RecipeError: this is an A/A recipe, which has none.
        """
        if self.quantization is None:
            raise RecipeError("the recipe has no `quantization`", fix="Only `quantkit run` has a use for it")
        return self.quantization

    def require_model(self) -> str:
        """The model's name.

        Raises:
            RecipeError: neither the recipe nor the command line names one.
        """
        if self.model is None:
            raise RecipeError("no model", fix="Give MODEL on the command line, or `model:` in the recipe")
        return self.model
