"""Where freed blocks go: back to the system at once, or into the next request for as much."""

import json
import platform
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries keep their own ways")

IN_A_PROCESS_OF_ITS_OWN = """
import json
import resource

from quantkit.calibration.heap import large_blocks_kept, return_large_blocks


def faults_of_a_block():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    b"1" * (16 << 20)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


return_large_blocks()
returned = [faults_of_a_block() for _ in range(3)]
with large_blocks_kept():
    faults_of_a_block()
    kept = [faults_of_a_block() for _ in range(3)]
again = [faults_of_a_block() for _ in range(3)]
with large_blocks_kept():
    with large_blocks_kept():
        pass
    faults_of_a_block()
    nested = [faults_of_a_block() for _ in range(3)]
print(json.dumps({"returned": returned, "kept": kept, "again": again, "nested": nested}))
"""


@pytest.fixture(scope="module")
def faults() -> dict[str, list[int]]:
    """Pages that the system has to find for a block of 16 MiB that is written and freed, three times in each state.

    In a process of its own: in one that has run other work, a gap between that work's blocks may be large enough.
    """
    done = subprocess.run([sys.executable, "-c", IN_A_PROCESS_OF_ITS_OWN], capture_output=True, text=True, check=True)
    numbers: dict[str, list[int]] = json.loads(done.stdout)
    return numbers


def test_freed_blocks_go_back_at_once(faults: dict[str, list[int]]) -> None:
    assert min(faults["returned"]) > 1  # pages may be huge


def test_freed_blocks_are_used_again_where_a_step_wants_the_same(faults: dict[str, list[int]]) -> None:
    assert 4 * max(faults["kept"]) < min(faults["returned"])


def test_the_outer_of_two_uses_outlives_the_inner(faults: dict[str, list[int]]) -> None:
    assert 4 * max(faults["nested"]) < min(faults["returned"])


def test_afterwards_they_go_back_again(faults: dict[str, list[int]]) -> None:
    assert min(faults["again"]) > 1
