"""What a recipe may say, as frozen pydantic models; the field names are the keys of the file.

A key of the recipe's full contract that is not built yet is listed in ``NOT_YET_KEYS`` or ``NOT_YET_VALUES``: it is
recognised and refused, never ignored. Building it means taking it off the list.
"""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, PrivateAttr, model_validator
from pydantic_core import PydanticCustomError

from quantkit.errors import RecipeError
from quantkit.formats.holds import why_not
from quantkit.recipe.calibration import Calibration
from quantkit.recipe.document import KeyPath
from quantkit.recipe.gates import Gates, Report
from quantkit.recipe.output import Output
from quantkit.recipe.quantization import Quantization
from quantkit.recipe.section import Section, Text, Unordered, fault
from quantkit.scheme import GROUP_SIZES, QuantScheme

# Key paths with [] for any index. The contract has them, quantkit does not yet.
NOT_YET_KEYS = frozenset(
    {
        "outputs[].type",
    }
)
NOT_YET_VALUES: dict[str, frozenset[Any]] = {
    "quantization.scheme": frozenset({"FP8_DYNAMIC", "NVFP4"}),
    "quantization.scheme.num_bits": frozenset({2, 3, 5, 6}),
    "quantization.overrides[].scheme": frozenset({"FP8_DYNAMIC", "NVFP4"}),
    "quantization.overrides[].scheme.num_bits": frozenset({2, 3, 5, 6}),
    "outputs[].format": frozenset({"gguf"}),
}


def _whole_number(value: Any) -> Any:
    """Literal[1] takes true and 1.0 for 1, because they are equal in Python."""
    if type(value) is not int:
        raise PydanticCustomError("choice", "{allowed}", {"allowed": ("1",), "keys": ()})
    return value


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
    _path: Path | None = PrivateAttr(None)

    @model_validator(mode="after")
    def _check(self) -> "Recipe":
        if self.quantization is None:
            for key in ("calibration", "outputs"):
                if getattr(self, key):
                    raise fault("without quantization the model is compared with itself, and this has no meaning", key)
        else:
            if not self.outputs:
                raise fault("missing; write [{format: compressed-tensors, path: FOLDER}]", "outputs")
            user = self.quantization.needs_calibration
            if user is not None and self.calibration is None:
                raise fault(f"missing; {user} needs it", "calibration")
            self._check_schemes(self.quantization)
        taken: dict[Path, KeyPath] = {}
        for number, output in enumerate(self.outputs):
            if any(output.path == path or output.path in path.parents or path in output.path.parents for path in taken):
                raise fault(
                    f"{output.path} is also the path of another output, or inside it", "outputs", number, "path"
                )
            taken[output.path] = ("outputs", number, "path")
        for key, path in self.report.paths.items():
            if path in taken:
                raise fault(f"{path} is also the path of another file of this recipe", "report", key)
            taken[path] = ("report", key)
        return self

    def _check_schemes(self, quantization: Quantization) -> None:
        """Every output can hold every scheme, and static inputs have data to find their scales with."""
        schemes: list[QuantScheme] = []
        for place, choice in quantization.choices.items():
            group_size = GROUP_SIZES[0] if choice.group_size == "auto" else choice.group_size
            schemes.append(choice.scheme(group_size))
            inputs = schemes[-1].input
            if inputs is not None and not inputs.dynamic and self.calibration is None:
                where = ("quantization", *place, "scheme")
                raise fault("static input scales are found by calibration, and there is no `calibration`", *where)
            for number, output in enumerate(self.outputs):
                reason = why_not(output.format, schemes[-1])
                if reason is not None:
                    raise fault(reason, "outputs", number, "format")

    @property
    def text(self) -> str:
        """The file as it was read."""
        return self._text

    @property
    def sha256(self) -> str:
        """Hexadecimal SHA-256 of the text in UTF-8."""
        return self._sha256

    @property
    def path(self) -> Path | None:
        """The file that it was read from; None if it was given as text."""
        return self._path

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
