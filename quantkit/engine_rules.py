"""What an engine asks of a checkpoint beyond its format: joined layers, kernels, shapes."""

from collections.abc import Iterator, Mapping, Sequence

from quantkit.architectures import ARCHITECTURES, Architecture
from quantkit.formats.compressed_tensors import PackedConfig
from quantkit.scheme import PER_CHANNEL, QuantScheme

VLLM_BITS = (4, 8)
VLLM_GROUP_SIZES = (PER_CHANNEL, 32, 64, 128)
MARLIN_ROWS, MARLIN_COLUMNS = 64, 128  # what vLLM's Marlin kernel wants N and K to be multiples of


def vllm_problems(model_type: str, config: PackedConfig, names: Sequence[str]) -> list[str]:
    """Why vLLM would refuse the checkpoint.

    Args:
        model_type: of config.json; says which layers vLLM joins into one matrix.
        config: the quantization_config.
        names: the layers that are stored as codes.

    Source: vLLM, quantization/compressed_tensors (one scheme for a joined layer) and the WNA16 kernels it picks from.
    """
    problems = []
    for unit, schemes in _fused_units(model_type, config, names):
        if len(set(schemes)) > 1:
            found = ", ".join("not quantized" if scheme is None else str(scheme) for scheme in schemes)
            problems.append(f"vLLM fuses {' and '.join(unit)}, which differ: {found}")
    for name in names:
        scheme = config.scheme_of(name)
        if scheme is not None and not (scheme.num_bits in VLLM_BITS and scheme.group_size in VLLM_GROUP_SIZES):
            problems.append(f"vLLM has no kernel for {name} ({scheme})")
    return problems


def vllm_notes(shapes: Mapping[str, tuple[int, int]]) -> list[str]:
    """What vLLM runs, but not with its fastest kernel.

    Args:
        shapes: layer -> (N, K).
    """
    slow = [name for name, (rows, columns) in shapes.items() if rows % MARLIN_ROWS or columns % MARLIN_COLUMNS]
    if not slow:
        return []
    return [
        f"{len(slow)} of {len(shapes)} layers, such as {slow[0]}, are no multiples of {MARLIN_ROWS} rows and "
        f"{MARLIN_COLUMNS} columns: vLLM reads them, but its Marlin kernel may not take them"
    ]


def _fused_units(
    model_type: str, config: PackedConfig, names: Sequence[str]
) -> Iterator[tuple[tuple[str, ...], list[QuantScheme | None]]]:
    """The layers that vLLM joins, with the scheme of each; a unit is met once."""
    seen = set()
    for unit in ARCHITECTURES.get(model_type, Architecture()).fused_units:
        for name in names:
            block = next((name.removesuffix(part) for part in unit if name.endswith(f".{part}")), None)
            if block is not None and (block, unit) not in seen:
                seen.add((block, unit))
                members = tuple(f"{block}{part}" for part in unit)
                yield members, [config.scheme_of(member) for member in members]
