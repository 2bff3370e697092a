"""Which modules of a model could be quantized, which a recipe leaves out, and which must be treated alike."""

import re
from collections.abc import Mapping, Sequence

from torch import nn

from quantkit.architectures import DecoderBlocks, fused_units
from quantkit.errors import RecipeError
from quantkit.scheme import QuantScheme
from quantkit.source.experts import is_fused, linear_experts, why_not_linear

IGNORED = "ignored"  # why a layer stays as it is


def weighty_modules(model: nn.Module, decoder: DecoderBlocks) -> tuple[dict[str, nn.Linear], dict[str, nn.Module]]:
    """All linear layers, and the other modules inside decoder blocks that own a matrix."""
    linears: dict[str, nn.Linear] = {}
    others: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            linears[name] = module
        elif name.startswith(f"{decoder.name}.") and any(p.dim() > 1 for p in module.parameters(recurse=False)):
            others[name] = module
    return linears, others


def matching(patterns: Sequence[str], names: Sequence[str], experts: Sequence[str]) -> set[str]:
    """Names that a pattern matches: the exact name, or a regular expression that matches all of it.

    Args:
        patterns: of the recipe.
        names: of what could be ignored.
        experts: names of modules of experts; who ignores one ignores its layers.
    """
    found: set[str] = set()
    for number, pattern in enumerate(patterns):
        matched = {name for name in names if name == pattern or re.fullmatch(pattern, name)}
        for module in experts:
            if module == pattern or re.fullmatch(pattern, module):
                matched |= {name for name in names if name.startswith(f"{module}.")}
        if not matched:
            raise RecipeError(
                f"quantization.ignore: {pattern!r} matches no layer of the model",
                fix=f"Layers are called {names[0]} ... {names[-1]}; a pattern must match the whole name",
                keys=("quantization", "ignore", number),
            )
        found |= matched
    return found


def refuse_what_stays_unsaid(
    linears: Mapping[str, nn.Linear], others: Mapping[str, nn.Module], ignored: set[str], decoder: DecoderBlocks
) -> None:
    """Whatever could be quantized and cannot be yet must be ignored by name, so that it is no surprise."""
    outside = [name for name in linears if name not in ignored and not name.startswith(f"{decoder.name}.")]
    if outside:
        raise RecipeError(
            f"quantizing {outside[0]}, which is outside the decoder blocks, is not supported yet",
            fix="Add it to quantization.ignore",
            keys=("quantization", "ignore"),
        )
    matrices = [name for name in others if name not in ignored]
    if matrices:
        reason = "which holds matrices but is no linear layer"
        if is_fused(others[matrices[0]]):
            reason = why_not_linear(others[matrices[0]]) or "whose experts are not one tensor per expert on disk"
        raise RecipeError(
            f"quantizing {matrices[0]}, {reason}, is not supported yet ({len(matrices)} such modules)",
            fix="Add them to quantization.ignore to keep them as they are",
            keys=("quantization", "ignore"),
        )


def check_fused_units(schemes: Mapping[str, QuantScheme], stays: Mapping[str, str]) -> None:
    """An engine joins these layers into one matrix: all of them have one scheme, or stay as they are."""
    for names in fused_units([*schemes, *stays]):
        if len({schemes.get(name) for name in names}) < 2:
            continue
        first = next(name for name in names if name in schemes)
        other = next(name for name in names if schemes.get(name) != schemes[first])
        found = f"is {schemes[other]}" if other in schemes else f"is {stays[other]}"
        raise RecipeError(
            f"quantization splits a unit that engines fuse: {other} {found} and {first} is {schemes[first]}",
            fix=f"Treat all of {', '.join(name.rpartition('.')[2] for name in names)} alike",
            keys=_decides(stays.get(other)),
        )


def check_experts(model: nn.Module, schemes: Mapping[str, QuantScheme], stays: Mapping[str, str]) -> None:
    """An engine joins all experts of a layer: they have one scheme, or stay as they are."""
    for experts, module in linear_experts(model).items():
        names = [f"{experts}.{layer}" for layer in module.stored]
        if len({schemes.get(name) for name in names}) > 1:
            first = next(name for name in names if name in schemes)
            other = next(name for name in names if schemes.get(name) != schemes[first])
            found = schemes[other] if other in schemes else stays[other]
            raise RecipeError(
                f"quantization splits the experts of a layer, which engines fuse: {other} is {found} and {first} is "
                f"{schemes[first]}",
                fix=f"Match all of {experts} with one pattern, such as {re.escape(experts)}.*",
                keys=_decides(stays.get(other)),
            )


def _decides(why_it_stays: str | None) -> tuple[str, str]:
    """The key that made a layer differ from the others."""
    return "quantization", "ignore" if why_it_stays == IGNORED else "overrides"
