"""What dispatch would choose on this machine, for every operation: the text of ``quantkit inspect --kernels``."""

import torch

from quantkit_kernels.dispatch import (
    CPU_MODULES,
    TRITON_MODULES,
    Choice,
    choose,
    choose_linear,
    choose_w4a16_gemm,
    choose_w8a8_gemm,
    choose_w8a16_gemm,
)

GROUP_SIZE = 128


def machine_devices() -> list[torch.device]:
    """The CPU, and the first GPU if there is one."""
    gpu = [torch.device("cuda", 0)] if torch.cuda.is_available() else []
    return [torch.device("cpu"), *gpu]


def choices(device: torch.device, dtype: torch.dtype) -> list[Choice]:
    """The choice for every operation, for tensors of ``dtype`` on ``device``; products with a weight of 64 x 256."""
    words = torch.zeros(64, 32, dtype=torch.int32, device=device)
    codes = torch.ones(64, 256, dtype=torch.int8, device=device)
    scale = torch.ones(64, 256 // GROUP_SIZE, dtype=dtype, device=device)
    return [
        choose_linear(device, dtype),
        choose_w4a16_gemm(words, scale, GROUP_SIZE, dtype),
        choose_w8a16_gemm(codes, dtype, GROUP_SIZE),
        choose_w8a8_gemm(codes, dtype),
        *(choose(operation, device) for operation in sorted(TRITON_MODULES.keys() | CPU_MODULES.keys())),
    ]


def choices_text(dtype: torch.dtype) -> list[str]:
    """A heading for each device of this machine, and a line for each operation."""
    lines = []
    for device in machine_devices():
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
        lines.append(f"{name}, activations in {dtype}:")
        lines += [f"  {choice}" for choice in choices(device, dtype)]
    return lines
