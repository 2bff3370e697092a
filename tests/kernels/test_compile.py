"""Every launch of every Triton module, compiled for three kinds of GPU with none at hand: what the code holds."""

from pathlib import Path

import pytest

pytest.importorskip("triton", reason="needs triton, which is for Linux")

from quantkit_kernels.compile_report import (
    MAX_REGISTERS,
    SHARED_LIMIT,
    CompileReport,
    innermost_loops,
    instructions_of,
    reports,
)
from quantkit_kernels.dispatch import TRITON_MODULES
from quantkit_kernels.launches import CAPABILITIES, Launch, load_launches, triton_modules

SASS = """
        /*0000*/                   LDC R1, c[0x0][0x28] ;               /* 0x00000a00ff017b82 */
                                                                        /* 0x000fe20000000800 */
        /*0010*/                   LDG.E.128 R4, desc[UR4][R2.64] ;     /* 0x0 */
        /*0020*/              @!P0 BRA 0x60 ;                           /* 0x0 */
        /*0030*/             @!UP1 HMMA.16816.F32.BF16 R4, R4, R8, R4 ; /* 0x0 */
        /*0040*/               @P1 BRA 0x30 ;                           /* 0x0 */
        /*0050*/                   BRA 0x10 ;                           /* 0x0 */
        /*0060*/                   EXIT ;                               /* 0x0 */
        /*0070*/                   BRA 0x70;                            /* 0x0 */
"""


def launches() -> dict[tuple[str, str, str], Launch]:
    found = load_launches()
    return {(module, launch.op, launch.label): launch for module, group in found.items() for launch in group}


def check(report: CompileReport, launch: Launch) -> list[str]:
    """What is wrong with the machine code of a launch, in words."""
    place = f"{report.op} {report.label}, sm_{report.capability}"
    wrong = [f"{place}: no {kind}" for kind in report.lacks(launch.needs)]
    if report.local_bytes or report.counts["spills"]:
        wrong.append(f"{place}: {report.local_bytes} bytes of local memory")
    if report.registers > MAX_REGISTERS:
        wrong.append(f"{place}: {report.registers} registers")
    if report.shared_bytes > SHARED_LIMIT[report.capability]:
        wrong.append(f"{place}: {report.shared_bytes} bytes of shared memory")
    if report.counts["atomics"]:
        wrong.append(f"{place}: {report.counts['atomics']} atomic operations, whose order is not fixed")
    return wrong


def test_every_module_ships_launches_with_names_of_their_own() -> None:
    found = load_launches()
    assert list(found) == triton_modules()
    assert all(found.values())
    assert len(launches()) == sum(len(group) for group in found.values())
    for launch in launches().values():
        assert launch.bytes > 0
        assert launch.flops >= 0
        assert launch.roofline_seconds > 0


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_every_operation_is_compiled_for_every_kind_of_gpu(capability: int) -> None:
    """And what each must hold is asked for: only sums over parts and the columns of GPTQ may read less at a time."""
    shipped = [launch for launch in launches().values() if capability in launch.capabilities]
    products = {"w4a16_gemm", "w8a16_gemm", "w8a8_gemm"}
    assert {launch.op for launch in shipped} == {*TRITON_MODULES, *products, "dequantize", "merge_splits", "add_splits"}
    without = {launch.op for launch in shipped if "128-bit loads" not in launch.needs}
    assert without == {"gptq_columns", "merge_splits", "add_splits"}
    for launch in shipped:
        is_vector = "M=1," in launch.label and launch.op in products
        is_product = launch.op in {*products, "paged_attention", "hessian_accumulate"} and not is_vector
        kind = "int8 mma" if launch.op == "w8a8_gemm" else "mma"
        assert (kind in launch.needs) == is_product, f"{launch.op} {launch.label}"


def test_the_page_lists_every_launch() -> None:
    """The figures need a compiler (`scripts/kernel_table.py --check`); that none is missing or gone does not."""
    page = (Path(__file__).parents[2] / "docs" / "KERNELS.md").read_text()
    listed = [tuple(line.split(" | ")[:2]) for line in page.splitlines() if line.count(" | ") == 9]
    assert listed[1:] == [(f"| {op}", label) for _, op, label in launches()]


def test_machine_code_is_read_rightly() -> None:
    instructions = instructions_of(SASS)
    assert [opcode for _, opcode, _ in instructions] == [
        "LDC", "LDG.E.128", "BRA", "HMMA.16816.F32.BF16", "BRA", "BRA", "EXIT", "BRA"
    ]  # fmt: skip
    assert innermost_loops(instructions) == [(0x30, 0x40)]  # the outer one holds it; the last jump is no loop


@pytest.mark.slow
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_every_launch_compiles_to_what_it_must(capability: int, pytestconfig: pytest.Config) -> None:
    """In a process of its own, without the interpreter; what was found is kept until kernel or configuration change."""
    assert pytestconfig.cache is not None
    cache = Path(pytestconfig.cache.mkdir("compile_reports"))
    found = reports(capabilities=(capability,), cache=cache)
    wanted = {key: launch for key, launch in launches().items() if capability in launch.capabilities}
    assert {(report.module, report.op, report.label) for report in found} == wanted.keys()
    wrong = [line for report in found for line in check(report, wanted[report.module, report.op, report.label])]
    assert not wrong, "\n".join(wrong)
