"""The device that an engine runs on."""

from typing import Literal

import torch
from torch import nn

from quantkit.errors import UsageError
from quantkit.serve.memory import available_bytes
from quantkit_kernels.dispatch import triton_blocker

CPU = torch.device("cpu")
DeviceName = Literal["auto", "cpu", "cuda"]


def resolve_device(name: DeviceName) -> torch.device:
    """The device to run on: as asked, or for ``auto`` a GPU that the kernels run on, else the CPU.

    Raises:
        UsageError: ``cuda``, and there is none, or the kernels do not run on it; one line.
    """
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return CPU
    if not torch.cuda.is_available():
        why = "torch finds no GPU" if torch.version.cuda else "this torch is built without CUDA"
        raise UsageError(f"device=cuda, and {why}", fix="give device=cpu")
    device = torch.device("cuda", torch.cuda.current_device())
    blocker = triton_blocker(device)
    if blocker is None:
        return device
    if name == "auto":
        return CPU
    raise UsageError(f"device=cuda, and {blocker}", fix="give device=cpu")


def runs_triton(device: torch.device) -> bool:
    """Whether a step runs on Triton bodies there: a GPU, or the CPU within `interpreter.interpret_triton`."""
    return triton_blocker(device) is None


def free_bytes(device: torch.device) -> int:
    """Bytes that can still be had on a device."""
    return available_bytes() if device.type == "cpu" else torch.cuda.mem_get_info(device)[0]


def device_name(device: torch.device) -> str:
    """``cpu``, or what a GPU is called."""
    return "cpu" if device.type == "cpu" else torch.cuda.get_device_name(device)


def move_parameters(model: nn.Module, device: torch.device) -> None:
    """Bring the parameters of a model that have data to a device; tied ones stay tied."""
    for parameter in model.parameters():
        if parameter.device != device and not parameter.is_meta:
            parameter.data = parameter.data.to(device)
