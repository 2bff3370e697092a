"""One choice for every unit, at the least cost that fits: a multiple-choice knapsack, solved exactly."""

import ctypes
import itertools
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_matrix

from quantkit.errors import QuantizationError

RELATIVE_GAP = 1e-4  # of the optimum; the costs are known far less well
SECONDS = 60.0


def choose(costs: Sequence[Sequence[float]], sizes: Sequence[Sequence[int]], budget: int) -> list[int]:
    """The choice of each unit that minimises the sum of costs while the sum of sizes stays within a budget.

    Args:
        costs: [U][F] cost of each choice of each unit; >= 0.
        sizes: [U][F] bytes of the same choices.
        budget: bytes.

    Returns:
        U numbers of choices.

    Raises:
        QuantizationError: even the smallest choices are larger than the budget, or the solver gives up.
    """
    smallest = sum(min(row) for row in sizes)
    if smallest > budget:
        raise QuantizationError(
            f"the smallest candidates take {smallest:,} bytes and the target allows {budget:,}",
            fix="Raise the target, or give candidates with fewer bits",
        )
    counts = [len(row) for row in costs]
    starts = numpy.cumsum([0, *counts])
    num_choices = int(starts[-1])
    unit = numpy.repeat(numpy.arange(len(counts)), counts)
    one_each = csr_matrix((numpy.ones(num_choices), (unit, numpy.arange(num_choices))))
    flat = numpy.concatenate([numpy.asarray(row, dtype=float) for row in costs])
    largest = flat.max() if flat.size and flat.max() > 0 else 1.0
    weights = numpy.concatenate([numpy.asarray(row, dtype=float) for row in sizes])
    with _nothing_printed():
        found = milp(
            flat / largest,
            integrality=numpy.ones(num_choices),
            bounds=Bounds(0, 1),
            constraints=[LinearConstraint(one_each, 1, 1), LinearConstraint(weights / budget, -numpy.inf, 1)],
            options={"mip_rel_gap": RELATIVE_GAP, "time_limit": SECONDS},
        )
    if found.x is None:
        raise QuantizationError(f"the allocation of bits was not solved: {found.message}")
    return [int(numpy.argmax(found.x[start:stop])) for start, stop in itertools.pairwise(starts)]


@contextmanager
def _nothing_printed() -> Iterator[None]:
    """Keep C code from writing to standard output: HiGHS does now and then, and a command's result stands there."""
    library = ctypes.CDLL(None)
    sys.stdout.flush()
    library.fflush(None)
    kept = os.dup(1)
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), 1)
    try:
        yield
    finally:
        library.fflush(None)  # what it has in its own buffer goes nowhere too
        os.dup2(kept, 1)
        os.close(kept)
