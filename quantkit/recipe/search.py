"""The section ``search``: what `quantkit search` tries and how it decides; `run` and `quantize` do not act on it."""

from typing import Annotated, Any

from pydantic import AfterValidator, Field, model_validator

from quantkit.capacity.devices import device_named
from quantkit.errors import UsageError
from quantkit.recipe.section import FilePath, Positive, Section, Text, Unordered, fault

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]


class SearchCandidate(Section):
    """A named variant: keys that take the place of the recipe's own keys of the same name in the two sections."""

    name: Name
    quantization: dict[str, Any] = Field(default_factory=dict)
    calibration: dict[str, Any] = Field(default_factory=dict)


class Budget(Section):
    """When no further trial is begun; the one that runs is finished."""

    minutes: Annotated[float, Field(gt=0)] | None = None
    trials: Positive | None = None


class Screening(Section):
    """The cheap look at every candidate: ``num_items`` of each suite in each of up to ``rounds`` rounds."""

    num_items: dict[Text, Positive] = Field(default_factory=dict)
    rounds: Annotated[int, Field(ge=1, le=16)] = 3


class Certification(Section):
    """The gate on items that no candidate was chosen by. Without ``num_items`` the gates' numbers count.

    Each of at most ``attempts`` candidates is judged with the error of a bound divided by ``attempts``.
    """

    num_items: dict[Text, Positive] = Field(default_factory=dict)
    attempts: Annotated[int, Field(ge=1, le=20)] = 3


def _known_device(name: str) -> str:
    try:
        return device_named(name).name
    except UsageError as error:
        raise fault(str(error)) from error


class PlannedSpeed(Section):
    """What the candidates' speed is planned for: ``batch`` sequences of ``context`` tokens decode on a ``device``.

    Nothing is decided by it; the report shows it beside size and quality.
    """

    device: Annotated[Text, AfterValidator(_known_device)] = "H100-80GB"
    batch: Annotated[int, Field(ge=1, le=4096)] = 16
    context: Annotated[int, Field(ge=1, le=2**24)] = 1024


class Search(Section):
    """How the smallest checkpoint that passes the gates is searched for.

    Without ``candidates`` they are made from the recipe's scheme. ``path`` is the folder of the search; without it,
    ``search`` beside the first output.
    """

    candidates: Annotated[tuple[SearchCandidate, ...], Unordered, Field(min_length=1)] | None = None
    budget: Budget = Budget()
    screening: Screening = Screening()
    certification: Certification = Certification()
    speed: PlannedSpeed = PlannedSpeed()
    path: FilePath | None = None
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0

    @model_validator(mode="after")
    def _check(self) -> "Search":
        seen: set[str] = set()
        for number, candidate in enumerate(self.candidates or ()):
            if candidate.name.lower() in seen:
                raise fault(f"the name {candidate.name!r} stands above already", "candidates", number, "name")
            seen.add(candidate.name.lower())
        return self
