"""What a recipe may say, as frozen pydantic models; the field names are the keys of the file.

A value of the recipe's full contract that is not built yet is listed in ``NOT_YET_VALUES``: it is recognised and
refused, never ignored. Building it means taking it off the list.
"""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, PrivateAttr, model_validator
from pydantic_core import PydanticCustomError

from quantkit.errors import RecipeError
from quantkit.formats.holds import why_not
from quantkit.recipe.calibration import Calibration
from quantkit.recipe.document import Document, KeyPath
from quantkit.recipe.gates import Gates, Report
from quantkit.recipe.output import CheckpointOutput, GgufOutput, Output
from quantkit.recipe.quantization import Quantization
from quantkit.recipe.search import Search
from quantkit.recipe.section import Section, Text, Unordered, fault
from quantkit.scheme import GROUP_SIZES, QuantScheme

# By key path, with [] for any index. The contract has them, quantkit does not yet.
NOT_YET_VALUES: dict[str, frozenset[Any]] = {
    "quantization.scheme": frozenset({"FP8_DYNAMIC", "NVFP4"}),
    "quantization.scheme.num_bits": frozenset({2, 3, 5, 6}),
    "quantization.overrides[].scheme": frozenset({"FP8_DYNAMIC", "NVFP4"}),
    "quantization.overrides[].scheme.num_bits": frozenset({2, 3, 5, 6}),
}


def _whole_number(value: Any) -> Any:
    """Literal[1] takes true and 1.0 for 1, because they are equal in Python."""
    if type(value) is not int:
        raise PydanticCustomError("choice", "{allowed}", {"allowed": ("1",), "keys": ()})
    return value


class Recipe(Section):
    """One model, how to quantize it, and what it must still be able to do.

    GGUF files say by their own ``type`` how they are quantized, and need no ``quantization``. Without it and without
    outputs the model is compared with itself (an A/A run): nothing is written but records and reports.
    """

    version: Annotated[Literal[1], BeforeValidator(_whole_number)]
    model: Text | None = None
    calibration: Calibration | None = None
    quantization: Quantization | None = None
    outputs: Annotated[tuple[Output, ...], Unordered] = ()
    gates: Gates = Gates()
    report: Report = Report()
    search: Search | None = None
    _text: str = PrivateAttr("")
    _sha256: str = PrivateAttr("")
    _path: Path | None = PrivateAttr(None)
    _document: Document | None = PrivateAttr(None)

    @model_validator(mode="after")
    def _check(self) -> "Recipe":
        if self.quantization is None:
            self._check_without_quantization()
        else:
            if not self.outputs:
                raise fault("missing; write [{format: compressed-tensors, path: FOLDER}]", "outputs")
            user = self.quantization.needs_calibration
            if user is not None and self.calibration is None:
                raise fault(f"missing; {user} needs it", "calibration")
            self._check_schemes(self.quantization)
            self._check_tuning(self.quantization)
        if self.search is not None:
            self._check_search(self.search)
        for number, output in enumerate(self.outputs):
            user = output.needs_calibration if isinstance(output, GgufOutput) else None
            if user is not None and self.calibration is None:
                raise fault("needs a `calibration` section, and there is none", "outputs", number, user)
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

    def _check_without_quantization(self) -> None:
        if self.checkpoints:
            number = self.outputs.index(self.checkpoints[0])
            raise fault("a checkpoint needs `quantization`, and there is none", "outputs", number, "format")
        if self.calibration is not None and not self.outputs:
            raise fault(
                "without quantization and outputs the model is compared with itself, and this has no meaning",
                "calibration",
            )

    def _check_search(self, search: Search) -> None:
        """There is something to decide by, and numbers of items are of suites that are run."""
        if not self.checkpoints or self.quantization is None:
            raise fault("a search needs `quantization`, and a checkpoint among the outputs", "search")
        if not self.gates.judges_quality:
            raise fault("missing; a search ends when gates pass: give max_drop_pp or max_kl_mean_nats", "gates")
        for key in ("screening", "certification"):
            for suite in getattr(search, key).num_items:
                if suite not in self.gates.suite_names:
                    raise fault(
                        f"the suite {suite} is not in gates.suites ({', '.join(self.gates.suite_names)})",
                        *("search", key, "num_items", suite),
                    )

    def _check_tuning(self, quantization: Quantization) -> None:
        """A GGUF file is made from the original weights, so tuning would silently not be in it."""
        for number, output in enumerate(self.outputs):
            if isinstance(output, GgufOutput) and quantization.tuning is not None:
                raise fault(
                    "a GGUF file is made from the original weights block by block, and its scales of scales (d, dmin) "
                    "are not tuned; write it by a recipe without quantization.tuning",
                    *("outputs", number, "format"),
                )

    def _check_schemes(self, quantization: Quantization) -> None:
        """Every output can hold every scheme, and static inputs have data to find their scales with."""
        for output in self.checkpoints if quantization.kv_cache is not None else ():
            if output.format != "compressed-tensors":
                number = self.outputs.index(output)
                raise fault(f"{output.format} holds no scales of keys and values", "outputs", number, "format")
        schemes: list[QuantScheme] = []
        for place, choice in quantization.choices.items():
            group_size = GROUP_SIZES[0] if choice.group_size == "auto" else choice.group_size
            schemes.append(choice.scheme(group_size))
            inputs = schemes[-1].input
            if inputs is not None and not inputs.dynamic and self.calibration is None:
                where = ("quantization", *place, "scheme")
                raise fault("static input scales are found by calibration, and there is no `calibration`", *where)
            for number, held_in in enumerate(self.outputs):
                reason = why_not(held_in.format, schemes[-1]) if isinstance(held_in, CheckpointOutput) else None
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
    def document(self) -> Document | None:
        """Where each key stands in the text; None if it was made without one."""
        return self._document

    def place(self, *keys: str | int) -> str:
        """``r.yaml:3:1: `` of a key, ``r.yaml: `` of one that is not there; nothing without keys or without a file."""
        if not keys or self._path is None or self._document is None:
            return ""
        if keys[0] not in self._document.data:
            return f"{self._path}: "
        position = self._document.position(keys, at_key=True)
        return f"{self._path}:{position.line}:{position.column}: "

    @property
    def model_keys(self) -> tuple[str, ...]:
        """The key that names the model; none if the command line does."""
        named = self._document is not None and self._document.data.get("model") == self.model
        return ("model",) if named else ()

    @property
    def is_self_comparison(self) -> bool:
        """Whether this is an A/A run: no quantization and no outputs, the model against itself."""
        return self.quantization is None and not self.outputs

    @property
    def checkpoints(self) -> tuple[CheckpointOutput, ...]:
        """The outputs that hold what ``quantization`` makes."""
        return tuple(output for output in self.outputs if isinstance(output, CheckpointOutput))

    @property
    def gguf_files(self) -> tuple[GgufOutput, ...]:
        """The outputs that are quantized from the original weights by types of their own."""
        return tuple(output for output in self.outputs if isinstance(output, GgufOutput))

    def with_model(self, model: str | None) -> "Recipe":
        """The same recipe for another model; None keeps the recipe's own."""
        return self if model is None else self.model_copy(update={"model": model})

    def require_outputs(self) -> None:
        """Nothing, if there is something to write.

        Raises:
            RecipeError: this is an A/A recipe, which writes no model.
        """
        if not self.outputs:
            self.require_quantization()

    def require_quantization(self) -> Quantization:
        """The part on quantization.

        Raises:
            RecipeError: this is an A/A recipe, which has none.
        """
        if self.quantization is None:
            place = self.place("quantization")
            raise RecipeError(f"{place}the recipe has no `quantization`", fix="Only `quantkit run` has a use for it")
        return self.quantization

    def require_search(self) -> Search:
        """The part on the search.

        Raises:
            RecipeError: there is none.
        """
        if self.search is None:
            fix = "Add `search: {}` to try what is made from its scheme"
            raise RecipeError(f"{self.place('search')}the recipe has no `search`", fix=fix)
        return self.search

    def require_model(self) -> str:
        """The model's name.

        Raises:
            RecipeError: neither the recipe nor the command line names one.
        """
        if self.model is None:
            fix = "Give MODEL on the command line, or `model:` in the recipe"
            raise RecipeError(f"{self.place('model')}no model", fix=fix)
        return self.model
