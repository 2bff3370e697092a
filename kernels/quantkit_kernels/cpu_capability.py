"""What this CPU can do, as far as the choice of a body depends on it."""

from functools import cache

import torch


@cache
def has_bfloat16_matmul() -> bool:
    """True if oneDNN multiplies bfloat16 matrices here (AVX-512 and newer); else torch does it in a slow plain loop."""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported()) if torch.backends.mkldnn.is_available() else False


@cache
def has_int8_matmul() -> bool:
    """True if the CPU multiplies whole numbers of 8 bits (VNNI); else torch does it in a slow plain loop."""
    return bool(torch.cpu._is_vnni_supported())


def describe_cpu() -> str:
    """One phrase for a report: the vector instructions, and whether bfloat16 matrices multiply fast."""
    bfloat16 = "with" if has_bfloat16_matmul() else "without"
    return f"{torch.backends.cpu.get_cpu_capability()}, {bfloat16} bfloat16 matrix products"
