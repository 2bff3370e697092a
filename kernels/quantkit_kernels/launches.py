"""What a Triton module ships: the configurations that its launcher uses, at shapes of real models, as data.

Every `triton_*.py` ends with ``LAUNCHES``. The launcher takes its configuration from the function that made those
entries, so that the machine code that is read without a GPU (`compile_report`) is the machine code that runs.
"""

import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

FlopDtype = Literal["bf16", "int8", "fp32"]
CAPABILITIES = (80, 90, 100)
NEEDS = ("mma", "int8 mma", "128-bit loads")
BYTES_PER_SECOND = 4.8e12  # H200, HBM3e
OPS_PER_SECOND: dict[FlopDtype, float] = {"bf16": 989e12, "int8": 1979e12, "fp32": 67e12}  # H200 SXM, dense


@dataclass(frozen=True)
class Launch:
    """One kernel in one configuration, with the work of one launch at one real shape.

    Attributes:
        op: name of the operation in `quantkit_kernels.reference`.
        label: the shape in words, e.g. "llama-3.1-8b down_proj, M=16".
        kernel: the `triton.jit` function.
        signature: Triton's type of every argument, e.g. "*bf16", "i32", "constexpr".
        constexprs: value of every constexpr argument.
        num_warps: warps of a program.
        num_stages: stages of the software pipeline.
        bytes: bytes that have to cross the memory bus in one launch, each operand once.
        flops: operations of one launch; a multiplication and an addition are two.
        flop_dtype: the type of unit that does them.
        needs: kinds of instructions that the machine code must hold, of `NEEDS`; "128-bit loads" means in an innermost
            loop, where the kernel has one.
        divisible_by_16: arguments (pointers and integers) that are known to be multiples of 16; Triton finds the same
            at run time.
        capabilities: the compute capabilities on which this configuration is used.
    """

    op: str
    label: str
    kernel: Any
    signature: dict[str, str]
    constexprs: dict[str, object]
    num_warps: int
    num_stages: int
    bytes: int
    flops: int
    flop_dtype: FlopDtype
    needs: tuple[str, ...] = ()
    divisible_by_16: tuple[str, ...] = ()
    capabilities: tuple[int, ...] = CAPABILITIES

    def __post_init__(self) -> None:
        constants = {name for name, kind in self.signature.items() if kind == "constexpr"}
        names = tuple(self.kernel.arg_names)
        assert tuple(self.signature) == names, f"{self.op} {self.label}: signature {[*self.signature]}, kernel {names}"
        assert constants == self.constexprs.keys(), f"{self.op} {self.label}: {constants ^ self.constexprs.keys()}"
        assert set(self.needs) <= set(NEEDS), f"{self.op} {self.label}: {self.needs}"
        assert set(self.divisible_by_16) <= set(names) - constants, f"{self.op} {self.label}: {self.divisible_by_16}"

    @property
    def roofline_seconds(self) -> float:
        """Least time of a launch on an H200: the slower one of memory and arithmetic."""
        return max(self.bytes / BYTES_PER_SECOND, self.flops / OPS_PER_SECOND[self.flop_dtype])


def triton_modules() -> list[str]:
    """Names of the modules that hold Triton kernels, in alphabetical order."""
    return sorted(path.stem for path in Path(__file__).parent.glob("triton_*.py"))


def load_launches(modules: list[str] | None = None) -> dict[str, tuple[Launch, ...]]:
    """The launches of each module, by its name; all modules by default. Imports triton.

    Raises:
        AttributeError: a module has no LAUNCHES.
    """
    wanted = triton_modules() if modules is None else modules
    return {name: importlib.import_module(f"quantkit_kernels.{name}").LAUNCHES for name in wanted}


def signature_of(kernel: Any, types: dict[str, str], constexprs: dict[str, object]) -> dict[str, str]:
    """The signature of a kernel in its own order: ``types`` of the arguments that are no constexpr, "i32" if absent."""
    return {name: "constexpr" if name in constexprs else types.get(name, "i32") for name in kernel.arg_names}
