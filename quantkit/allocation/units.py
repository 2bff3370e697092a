"""Layers that get their scheme together, because engines join them into one matrix."""

from collections.abc import Sequence
from dataclasses import dataclass

from quantkit.architectures import fused_units
from quantkit.formats.expert_names import experts_of
from quantkit.plan import LayerPlan


@dataclass(frozen=True, slots=True)
class Unit:
    """Layers of one decoder block that share a scheme.

    Attributes:
        name: of its first layer; a unit of several is called after all of them, such as ``...self_attn.q+k+v_proj``,
            and the experts of a layer after their module.
        layers: names in the model.
        num_weights: of all its layers.
    """

    name: str
    layers: tuple[str, ...]
    num_weights: int


def find_units(layers: Sequence[LayerPlan]) -> list[Unit]:
    """The units of some layers, in the order of the model.

    Args:
        layers: those to allocate; a unit that engines fuse is among them as a whole, which the plan has checked.
    """
    by_name = {layer.name: layer for layer in layers}
    joined = {name: names for names in fused_units(by_name) for name in names}
    of_experts: dict[str, list[str]] = {}
    for name in by_name:
        module = experts_of(name)
        if module is not None:
            of_experts.setdefault(module, []).append(name)
    units: list[Unit] = []
    taken: set[str] = set()
    for layer in layers:
        if layer.name in taken:
            continue
        members = joined.get(layer.name, (layer.name,))
        experts = experts_of(layer.name)
        if experts is not None:
            members = tuple(of_experts[experts])
        taken.update(members)
        weights = sum(by_name[name].shape[0] * by_name[name].shape[1] for name in members)
        units.append(Unit(experts or _unit_name(members), members, weights))
    return units


def _unit_name(members: tuple[str, ...]) -> str:
    """One name for several layers: what differs, joined by +."""
    if len(members) == 1:
        return members[0]
    parent, _, _ = members[0].rpartition(".")
    leaves = [name.rpartition(".")[2] for name in members]
    ending = "_proj" if all(leaf.endswith("_proj") for leaf in leaves) else ""
    return f"{parent}.{'+'.join(leaf.removesuffix(ending) for leaf in leaves)}{ending}"
