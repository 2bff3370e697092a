"""Checks that every format makes: of a weight before it is stored, and of tensors before they are decoded."""

from collections.abc import Mapping

import torch
from torch import Tensor

from quantkit.errors import CheckpointError
from quantkit.formats.holds import why_not
from quantkit.formats.safetensors_file import TensorSpec
from quantkit.primitives import QuantizedWeight


def check_weight(form: str, name: str, weight: QuantizedWeight, input_scale: Tensor | None) -> None:
    """Refuse what would be stored wrongly.

    Raises:
        CheckpointError: a scheme that the format does not hold, a code out of range, a scale that is zero or not
            finite, or an input scale that is missing or too much.
    """
    scheme = weight.scheme
    reason = why_not(form, scheme)
    if reason is not None:
        raise CheckpointError(f"{name}: {reason}")
    for what, codes in (("codes", weight.codes), ("zero points", weight.zero_point)):
        if codes is not None:
            low, high = codes.aminmax()
            if low < scheme.code_min or high > scheme.code_max:
                raise CheckpointError(f"{name}: {what} from {low} to {high} do not fit into {scheme.num_bits} bits")
    if not torch.isfinite(weight.scale).all():
        raise CheckpointError(f"{name}: a scale is not finite in {weight.scale.dtype}")
    if bool((weight.scale == 0).any()):
        raise CheckpointError(f"{name}: a scale is zero")
    static = scheme.input is not None and not scheme.input.dynamic
    if static != (input_scale is not None):
        raise CheckpointError(f"{name}: {scheme} needs {'an' if static else 'no'} input scale")
    if input_scale is not None and not (torch.isfinite(input_scale).all() and bool((input_scale > 0).all())):
        raise CheckpointError(f"{name}: the input scale {input_scale.flatten().tolist()} is not positive")


def take(tensors: Mapping[str, Tensor], name: str, expected: Mapping[str, TensorSpec]) -> list[Tensor]:
    """The tensors of a layer, in the order of ``expected``.

    Raises:
        CheckpointError: one is missing, or has another type or shape.
    """
    found = []
    for tensor_name, spec in expected.items():
        if tensor_name not in tensors:
            raise CheckpointError(f"{name} has no {tensor_name.removeprefix(f'{name}.')}")
        tensor = tensors[tensor_name]
        if TensorSpec(tensor.dtype, tuple(tensor.shape)) != spec:
            raise CheckpointError(
                f"{tensor_name} is {tensor.dtype} {list(tensor.shape)}, needed is {spec.dtype} {list(spec.shape)}"
            )
        found.append(tensor)
    return found


def to_float16(form: str, name: str, scale: Tensor) -> Tensor:
    """Scales in float16, bit for bit the same numbers.

    Raises:
        CheckpointError: a scale overflows, underflows or would be rounded.
    """
    narrow = scale.to(torch.float16)
    wrong = narrow.float() != scale.float()
    if bool(wrong.any()):
        value = float(scale[wrong].float()[0])
        what = "overflows" if abs(value) > torch.finfo(torch.float16).max else "is lost"
        raise CheckpointError(
            f"{name}: {form} stores scales in float16, where the scale {value:.4g} {what}",
            fix="Write compressed-tensors, which keeps the model's own type, or leave this layer as it is",
        )
    return narrow
