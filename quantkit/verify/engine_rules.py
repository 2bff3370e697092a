"""What an engine asks of a checkpoint beyond its format: joined layers, kernels, shapes."""

from collections.abc import Mapping, Sequence

import torch

from quantkit.architectures import fused_units
from quantkit.formats import StoredConfig
from quantkit.formats.expert_names import experts_of
from quantkit.formats.holds import why_not_experts
from quantkit.scheme import PER_CHANNEL, QuantScheme

VLLM_BITS = (4, 8)
VLLM_GROUP_SIZES = (PER_CHANNEL, 32, 64, 128)
TENSOR_PARALLEL = (1, 2, 4, 8)
ROW_PARALLEL = ("o_proj", "down_proj", ".w2")  # layers whose columns are spread over GPUs; of all others it is the rows
MARLIN_ROWS, MARLIN_COLUMNS = 64, 128  # what vLLM's Marlin kernel wants N and K to be multiples of
MARLIN_EXPERT_ROWS, MARLIN_EXPERT_COLUMNS = 128, 64  # the same for the down projection of an expert


def vllm_problems(config: StoredConfig, names: Sequence[str], stays: Sequence[str] = ()) -> list[str]:
    """Why vLLM would refuse the checkpoint.

    Args:
        config: the quantization_config.
        names: the layers that are stored as codes.
        stays: the linear layers that are not.

    Source: vLLM, quantization/compressed_tensors (one scheme for a joined layer) and the WNA16 kernels it picks from.
    """
    problems: list[str] = []
    for unit in fused_units([*names, *stays]):
        schemes = [None if name in stays else config.scheme_of(name) for name in unit]
        if len(set(schemes)) > 1:
            found = ", ".join("not quantized" if scheme is None else str(scheme) for scheme in schemes)
            problems.append(f"vLLM fuses {' and '.join(unit)}, which differ: {found}")
    for name in names:
        scheme = config.scheme_of(name)
        if scheme is not None and not (scheme.num_bits in VLLM_BITS and scheme.group_size in VLLM_GROUP_SIZES):
            problems.append(f"vLLM has no kernel for {name} ({scheme})")
    return problems + _expert_problems(config, names)


def _expert_problems(config: StoredConfig, names: Sequence[str]) -> list[str]:
    """What vLLM has against quantized experts."""
    schemes: dict[str, dict[QuantScheme | None, str]] = {}
    for name in names:
        experts = experts_of(name)
        if experts is not None:
            schemes.setdefault(experts, {}).setdefault(config.scheme_of(name), name)
    problems: list[str] = []
    for experts, found in schemes.items():
        if len(found) > 1:
            first, second = list(found.items())[:2]
            problems.append(f"vLLM fuses {experts}, where {first[1]} is {first[0]} and {second[1]} is {second[0]}")
            continue
        (scheme,) = found
        problem = None if scheme is None else why_not_experts(config.format.name, scheme)
        if problem is not None:
            problems.append(f"{problem} ({experts}: {scheme})")
    return problems


def engine_notes(config: StoredConfig, dtype: torch.dtype, shapes: Mapping[str, tuple[int, int]]) -> list[str]:
    """What engines take, and what they take but not with their fastest kernel.

    Args:
        config: the quantization_config.
        dtype: of the weights that are not quantized.
        shapes: layer -> (N, K) of every quantized layer.
    """
    slow = [
        name
        for name, (rows, columns) in shapes.items()
        if _has_marlin(config, name) and not _fits_marlin(config, name, rows, columns)
    ]
    notes = []
    if slow:
        notes.append(
            f"{len(slow)} of {len(shapes)} layers, such as {slow[0]}, are no multiples of {MARLIN_ROWS} rows and "
            f"{MARLIN_COLUMNS} columns: vLLM reads them, but its Marlin kernel may not take them"
        )
    marlin = not slow and all(_has_marlin(config, name) for name in shapes)
    if config.format.name in ("gptq", "awq") and not marlin and dtype != torch.float16:
        notes.append(
            f"vLLM runs {config.format.name} layers that Marlin does not take in float16: give it dtype float16"
        )
    degrees = [degree for degree in TENSOR_PARALLEL if all(_splits(config, *item, degree) for item in shapes.items())]
    if shapes:
        notes.append(f"vLLM can split it over {_or(degrees)} GPUs (of {_or(TENSOR_PARALLEL)} that were looked at)")
    if config.kv_scales:
        notes.append(
            "vLLM keeps keys and values in fp8 with the stored scales; quantkit's own engine does not use them"
        )
    reason = _why_not_llama_cpp(config)
    if reason is not None:
        notes.append(f"llama.cpp's converter does not take it: {reason}")
    return notes


def _or(numbers: Sequence[int]) -> str:
    return " or ".join([", ".join(map(str, numbers[:-1])), str(numbers[-1])] if len(numbers) > 1 else map(str, numbers))


def _has_marlin(config: StoredConfig, name: str) -> bool:
    """Whether Marlin has a kernel for the layer's scheme; its shape is another matter."""
    scheme = config.scheme_of(name)
    assert scheme is not None, "shapes are of quantized layers"
    if scheme.input is not None:
        return False
    return scheme.symmetric or config.format.name != "gptq"


def _fits_marlin(config: StoredConfig, name: str, rows: int, columns: int) -> bool:
    """Whether Marlin takes the layer's shape."""
    if experts_of(name) is None or not name.endswith(ROW_PARALLEL):
        return rows % MARLIN_ROWS == 0 and columns % MARLIN_COLUMNS == 0
    scheme = config.scheme_of(name)
    assert scheme is not None, "shapes are of quantized layers"
    return rows % MARLIN_EXPERT_ROWS == 0 and columns % max(MARLIN_EXPERT_COLUMNS, scheme.group_size) == 0


def _splits(config: StoredConfig, name: str, shape: tuple[int, int], degree: int) -> bool:
    """Whether a layer can be cut for ``degree`` GPUs: by columns and whole groups, or by rows."""
    scheme = config.scheme_of(name)
    assert scheme is not None, "shapes are of quantized layers"
    if name.endswith(ROW_PARALLEL):
        return shape[1] % (degree * max(scheme.group_size, 1)) == 0
    return shape[0] % degree == 0


def _why_not_llama_cpp(config: StoredConfig) -> str | None:
    """What llama.cpp's convert_hf_to_gguf.py has against a checkpoint; None if nothing.

    Source: llama.cpp, conversion/base.py.
    """
    if config.format.name == "awq":
        return "it does not read awq"
    if config.format.name == "compressed-tensors":
        if config.kv_scales:
            return "it does not know k_scale"
        if len(config.groups) > 1:
            return "it reads one scheme only"
        scheme = config.groups[0][1]
        if scheme.input is None and scheme.group_size == PER_CHANNEL:
            return "it reads pack-quantized in groups only"
        if scheme.input is not None and not scheme.input.dynamic:
            return "it does not know input_scale"
    return None
