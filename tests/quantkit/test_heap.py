"""Where freed blocks go: back to the system at once, or into the next request for as much."""

import platform
import resource
from collections.abc import Iterator

import pytest
import torch

from quantkit.calibration.heap import large_blocks_kept, return_large_blocks

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries keep their own ways")
BYTES = 16 << 20


@pytest.fixture(autouse=True)
def returning() -> Iterator[None]:
    return_large_blocks()
    yield
    return_large_blocks()


def faults_of_a_block() -> int:
    """Pages that the system has to find for a block that is written and freed."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(BYTES // 4)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def test_freed_blocks_go_back_at_once() -> None:
    assert min(faults_of_a_block() for _ in range(3)) > 1  # pages may be huge


def test_freed_blocks_are_used_again_where_a_step_wants_the_same() -> None:
    with large_blocks_kept():
        faults_of_a_block()
        kept = faults_of_a_block()
    assert 4 * kept < faults_of_a_block()
