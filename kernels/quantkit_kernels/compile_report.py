"""Compile a `Launch` with no GPU and read the machine code: ``python -m quantkit_kernels.compile_report``.

Prints one JSON object a line for each launch and compute capability. Triton's interpreter replaces the compiler when a
kernel is defined, so a process that may have set TRITON_INTERPRET asks `reports`, which compiles in a new one.
"""

import argparse
import dataclasses
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from quantkit_kernels.launches import CAPABILITIES, Launch, load_launches, triton_modules

SHARED_LIMIT = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}  # bytes a program may have
MAX_REGISTERS = 255
# Kind of instruction: its opcodes. Tensor memory (sm_100) is fed by UTC*MMA, warp groups (sm_90) by *GMMA.
OPCODES = {
    "mma": re.compile(r"HMMA|HGMMA|UTC[A-Z]*HMMA|UTC[A-Z]*QMMA"),
    "int8 mma": re.compile(r"IMMA|IGMMA|UTC[A-Z]*IMMA"),
    "wide mma": re.compile(r"HGMMA|IGMMA|UTC[A-Z]*MMA"),
    "128-bit loads": re.compile(r"(LDG|LDGSTS)\.\S*(128|256)|UTMALDG|UBLKCP"),
    "cp.async": re.compile(r"LDGSTS"),
    "tma": re.compile(r"UTMALDG|UBLKCP"),
    "global loads": re.compile(r"LDG(STS)?\b|UTMALDG|UBLKCP"),
    "atomics": re.compile(r"ATOMG?\.|RED\."),
    "spills": re.compile(r"LDL|STL"),
}
_INSTRUCTION = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)([^;]*)")


@dataclass(frozen=True)
class CompileReport:
    """What one launch compiles to for one kind of GPU.

    Attributes:
        module: name of the Triton module.
        op: of the launch.
        label: of the launch.
        capability: 80, 90 or 100.
        registers: of a thread.
        local_bytes: stack and local memory of a thread; spilled registers lie there.
        shared_bytes: shared memory of a program.
        counts: instructions by kind, see `OPCODES`.
        loop_counts: those of them in innermost loops.
        has_loop: there is a loop at all.
        instructions: all of them.
    """

    module: str
    op: str
    label: str
    capability: int
    registers: int
    local_bytes: int
    shared_bytes: int
    counts: dict[str, int]
    loop_counts: dict[str, int]
    has_loop: bool
    instructions: int

    def lacks(self, needs: tuple[str, ...]) -> list[str]:
        """Those of a launch's needs that the code does not meet."""
        in_loop = {"128-bit loads": self.loop_counts if self.has_loop else self.counts}
        return [kind for kind in needs if not in_loop.get(kind, self.counts)[kind]]


def compile_launch(launch: Launch, capability: int) -> tuple[bytes, int]:
    """The machine code of a launch, and the bytes of shared memory that it asks for."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = list(launch.signature)
    source = ASTSource(
        fn=launch.kernel,
        signature=launch.signature,
        constexprs={(names.index(name),): value for name, value in launch.constexprs.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in launch.divisible_by_16},
    )
    options = {"num_warps": launch.num_warps, "num_stages": launch.num_stages}
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    return compiled.asm["cubin"], compiled.metadata.shared


def read_machine_code(cubin: bytes) -> tuple[str, str]:
    """(SASS, resource usage) of a cubin in words, with the tool that Triton brings."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        sass, usage = (
            subprocess.run([tool, flag, file.name], check=True, capture_output=True, text=True).stdout
            for flag in ("-sass", "-res-usage")
        )
    return sass, usage


def instructions_of(sass: str) -> list[tuple[int, str, str]]:
    """(address, opcode, operands) of every instruction."""
    found = (_INSTRUCTION.match(line) for line in sass.splitlines())
    return [(int(match[1], 16), match[2], match[3].strip()) for match in found if match]


def innermost_loops(instructions: list[tuple[int, str, str]]) -> list[tuple[int, int]]:
    """(first, last) address of each loop that holds no other: the span of a jump backwards."""
    spans = []
    for address, opcode, operands in instructions:
        target = re.search(r"0x([0-9a-f]+)", operands) if opcode.startswith("BRA") else None
        if target and int(target[1], 16) < address:  # the last instruction of a program jumps to itself
            spans.append((int(target[1], 16), address))
    return [
        (first, last)
        for first, last in spans
        if not any(first <= a and b <= last and (a, b) != (first, last) for a, b in spans)
    ]


def report(module: str, launch: Launch, capability: int) -> CompileReport:
    """Compile one launch and read its machine code."""
    cubin, shared = compile_launch(launch, capability)
    sass, usage = read_machine_code(cubin)
    instructions = instructions_of(sass)
    loops = innermost_loops(instructions)
    counts, loop_counts = Counter[str](), Counter[str]()
    for address, opcode, _ in instructions:
        for kind, pattern in OPCODES.items():
            if pattern.match(opcode):
                counts[kind] += 1
                loop_counts[kind] += any(first <= address <= last for first, last in loops)
    used = {name: int(value) for name, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", usage)}
    return CompileReport(
        module=module,
        op=launch.op,
        label=launch.label,
        capability=capability,
        registers=used["REG"],
        local_bytes=used["STACK"] + used["LOCAL"],
        shared_bytes=shared,
        counts={kind: counts[kind] for kind in OPCODES},
        loop_counts={kind: loop_counts[kind] for kind in OPCODES},
        has_loop=bool(loops),
        instructions=len(instructions),
    )


def cached_report(module: str, launch: Launch, capability: int, folder: Path) -> CompileReport:
    """`report`, or what it said before of the same kernel in the same configuration."""
    import triton

    key = (
        triton.__version__,
        launch.kernel.cache_key,
        launch.signature,
        launch.constexprs,
        (launch.num_warps, launch.num_stages, launch.divisible_by_16, capability),
        Path(__file__).read_text(),
        (module, launch.op, launch.label),
    )
    path = folder / f"{hashlib.sha256(repr(key).encode()).hexdigest()}.json"
    if path.exists():
        return CompileReport(**json.loads(path.read_text()))
    made = report(module, launch, capability)
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(dataclasses.asdict(made)))
    return made


def reports(
    modules: list[str] | None = None,
    capabilities: tuple[int, ...] = CAPABILITIES,
    cache: Path | None = None,
    label: str = "",
) -> list[CompileReport]:
    """The reports of all launches of some modules (default: all), compiled in a process without the interpreter.

    Args:
        modules: names such as "triton_w4a16".
        capabilities: 80, 90, 100.
        cache: a folder for what was found; None to compile everything again.
        label: only launches whose label contains it.

    Raises:
        RuntimeError: something does not compile; the end of the compiler's message.
    """
    command = [sys.executable, "-m", "quantkit_kernels.compile_report"]
    command += [f"--module={name}" for name in modules or triton_modules()]
    command += [f"--capability={number}" for number in capabilities]
    command += [f"--label={label}"] + ([] if cache is None else [f"--cache={cache}"])
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"compilation failed: {done.stderr[-3000:]}")
    return [CompileReport(**json.loads(line)) for line in done.stdout.splitlines()]


def main() -> None:
    """Compile and print."""
    parser = argparse.ArgumentParser(prog="python -m quantkit_kernels.compile_report", description=__doc__)
    parser.add_argument("--module", action="append", choices=triton_modules(), help="default: all")
    parser.add_argument("--capability", action="append", type=int, choices=CAPABILITIES, help="default: all")
    parser.add_argument("--label", default="", help="only launches whose label contains this")
    parser.add_argument("--cache", type=Path, help="folder for what was found before")
    arguments = parser.parse_args()
    wanted = set(arguments.capability or CAPABILITIES)
    with tempfile.TemporaryDirectory() as scratch:
        os.environ.setdefault("TRITON_CACHE_DIR", scratch)
        for module, launches in load_launches(arguments.module).items():
            for launch in launches:
                if arguments.label not in launch.label:
                    continue
                for capability in sorted(wanted & set(launch.capabilities)):
                    found = (
                        report(module, launch, capability)
                        if arguments.cache is None
                        else cached_report(module, launch, capability, arguments.cache)
                    )
                    print(json.dumps(dataclasses.asdict(found)), flush=True)


if __name__ == "__main__":
    main()
