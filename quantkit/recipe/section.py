"""What every section of a recipe is made of: a strict frozen model, types of fields, errors of validators."""

from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError


class Section(BaseModel):
    """Frozen, no unknown keys, no conversion of types, no NaN."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


def fault(message: str, *keys: str | int) -> PydanticCustomError:
    """An error of a validator at the key path ``keys`` below the model that raises it."""
    return PydanticCustomError("recipe", "{message}", {"message": message, "keys": keys})


def not_yet(*keys: str | int) -> PydanticCustomError:
    """The key path ``keys`` below the model is of the contract, but not supported yet."""
    return PydanticCustomError("not_yet", "{keys}", {"keys": keys})


def _not_blank(text: str) -> str:
    if not text.strip():
        raise fault("empty")
    return text


def _expand(path: str) -> str:
    return str(Path(_not_blank(path)).expanduser())


def _to_path(value: Any) -> Any:
    return Path(_expand(value)) if isinstance(value, str) else value


PathText = Annotated[str, AfterValidator(_expand)]
FilePath = Annotated[Path, BeforeValidator(_to_path)]
Text = Annotated[str, AfterValidator(_not_blank)]
Share = Annotated[float, Field(gt=0, le=1)]
Positive = Annotated[int, Field(ge=1)]
Unordered = Field(strict=False)  # a YAML list for a tuple; the items stay strict
