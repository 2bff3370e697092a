"""The experts of a layer in a ``quantization_config``: engines join them, so one name stands for all their layers."""

import re
from collections.abc import Iterable, Mapping

from quantkit.scheme import QuantScheme

_EXPERT_LAYER = re.compile(r"(.+\.experts)\.\d+\.[^.]+")


def experts_of(name: str) -> str | None:
    """The module of experts that a layer of one belongs to; None for any other layer."""
    found = _EXPERT_LAYER.fullmatch(name)
    return found[1] if found else None


def join_names(names: Iterable[str]) -> list[str]:
    """The names in order, the layers of experts under that of their module, each once."""
    return list(dict.fromkeys(experts_of(name) or name for name in names))


def join_schemes(schemes: Mapping[str, QuantScheme]) -> dict[str, QuantScheme]:
    """Layer -> scheme, the layers of experts under the name of their module.

    Raises:
        ValueError: the experts of a layer have several schemes.
    """
    joined: dict[str, QuantScheme] = {}
    for name, scheme in schemes.items():
        if joined.setdefault(experts_of(name) or name, scheme) != scheme:
            raise ValueError(f"{experts_of(name)} holds {scheme} and {joined[str(experts_of(name))]}")
    return joined


def expression(name: str) -> str:
    """An expression that matches the beginning of a module of experts and of all its layers; else the whole name."""
    return rf"{re.escape(name)}(?:\.|$)" if name.endswith(".experts") else rf"{re.escape(name)}$"
