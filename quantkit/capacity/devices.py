"""Devices that a model could run on: from the data file, or this machine's processor, measured."""

import difflib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any, Protocol

from quantkit.errors import UsageError

# What of a data sheet's figures a good engine reaches, and what its steps cost beside the arithmetic: assumptions.
BANDWIDTH_SHARE, COMPUTE_SHARE = 0.8, 0.7
WEIGHT_ONLY_SHARE = 0.85  # of the 16-bit rate, where codes are widened inside a compute-bound product
STEP_SECONDS, LAYER_SECONDS = 0.3e-3, 15e-6
GATHER_PASSES = 3  # over keys and values where they are gathered first: read, write, read again


@dataclass(frozen=True, slots=True)
class ProductTime:
    """Seconds of a product: to read the matrix, to multiply it, and both together."""

    read: float
    multiply: float
    total: float


class ProductSpeed(Protocol):
    """How fast a kind of product is."""

    def time(self, nbytes: float, parameters: float, rows: float) -> ProductTime:
        """Seconds of ``rows`` vectors times matrices of ``parameters`` numbers that lie in ``nbytes``."""
        ...


@dataclass(frozen=True, slots=True)
class Roofline:
    """Reading or multiplying, whichever takes longer.

    Attributes:
        bytes_per_s: of weights.
        flops: operations a second.
    """

    bytes_per_s: float
    flops: float

    def time(self, nbytes: float, parameters: float, rows: float) -> ProductTime:
        """See `ProductSpeed`."""
        read, multiply = nbytes / self.bytes_per_s, 2 * parameters * rows / self.flops
        return ProductTime(read, multiply, max(read, multiply))


@dataclass(frozen=True, slots=True)
class MeasuredProducts:
    """Measured for some numbers of rows, and interpolated between them on logarithmic axes.

    A processor's bodies change with the number of rows, which two figures cannot say.

    Attributes:
        points: (rows, seconds a parameter), rows ascending.
        bytes_per_s: of memory.
    """

    points: tuple[tuple[int, float], ...]
    bytes_per_s: float

    def time(self, nbytes: float, parameters: float, rows: float) -> ProductTime:
        """See `ProductSpeed`; beyond the last point the time grows with the rows."""
        read, total = nbytes / self.bytes_per_s, parameters * self._seconds(rows)
        return ProductTime(read, max(0.0, total - read) if rows <= 1 else total, total)

    def _seconds(self, rows: float) -> float:
        first, last = self.points[0], self.points[-1]
        if rows <= first[0]:
            return first[1]
        if rows >= last[0]:
            return last[1] * rows / last[0]
        above = next(index for index, point in enumerate(self.points) if point[0] >= rows)
        (x0, y0), (x1, y1) = self.points[above - 1], self.points[above]
        part = math.log(rows / x0) / math.log(x1 / x0)
        return math.exp(math.log(y0) + part * math.log(y1 / y0))


@dataclass(frozen=True, slots=True)
class Device:
    """A device.

    Attributes:
        name: as the user names it.
        memory_bytes: all of it.
        bytes_per_s: memory bandwidth by the data sheet, or measured.
        flops: dense operations a second by type of product: ``16-bit``, ``fp8``, ``int8``.
        source: the document that states the figures, or how they were measured.
        measured: what was measured, by kind of product (``weight-only`` is one); taken as it is, without the shares.
        step_seconds: of a step, whatever it computes.
        layer_seconds: of a layer in a step.
        request_layer_seconds: of a layer for each request of a step.
        is_confirmed: every figure was found in a copy of the document.
    """

    name: str
    memory_bytes: float
    bytes_per_s: float
    flops: Mapping[str, float]
    source: str
    measured: Mapping[str, MeasuredProducts] = field(default_factory=dict)
    step_seconds: float = STEP_SECONDS
    layer_seconds: float = LAYER_SECONDS
    request_layer_seconds: float = 0.0
    is_confirmed: bool = True

    def products(self, compute: str, *, weight_only: bool) -> ProductSpeed | None:
        """How fast a kind of product is here; None if the device does not have it."""
        if self.measured:
            return self.measured.get("weight-only" if weight_only else compute)
        if compute not in self.flops:
            return None
        share = COMPUTE_SHARE * (WEIGHT_ONLY_SHARE if weight_only else 1)
        return Roofline(self.bytes_per_s * BANDWIDTH_SHARE, self.flops[compute] * share)

    @property
    def cache_bytes_per_s(self) -> float:
        """Bandwidth for keys and values; an engine without a kernel of its own copies them before it reads them."""
        return self.bytes_per_s / GATHER_PASSES if self.measured else self.bytes_per_s * BANDWIDTH_SHARE

    def to_dict(self) -> dict[str, Any]:
        """As one JSON document."""
        return {
            "name": self.name,
            "memory_bytes": self.memory_bytes,
            "bytes_per_s": self.bytes_per_s,
            "flops": dict(self.flops),
            "measured": {
                kind: [{"rows": rows, "seconds_per_parameter": seconds} for rows, seconds in products.points]
                for kind, products in self.measured.items()
            },
            "step_seconds": self.step_seconds,
            "layer_seconds": self.layer_seconds,
            "request_layer_seconds": self.request_layer_seconds,
            "source": self.source,
            "confirmed": self.is_confirmed,
        }


@cache
def known_devices() -> dict[str, Device]:
    """The devices of the data file, by name."""
    text = files("quantkit.capacity").joinpath("devices.json").read_text(encoding="utf-8")
    return {
        name: Device(
            name,
            entry["memory_gb"] * 1e9,
            entry["bandwidth_gb_s"] * 1e9,
            {kind: value * 1e12 for kind, value in entry["tflops"].items()},
            entry["source"],
            is_confirmed=entry.get("confirmed", True),
        )
        for name, entry in json.loads(text)["devices"].items()
    }


def device_named(name: str) -> Device:
    """A device of the data file; upper and lower case are one.

    Raises:
        UsageError: there is none of that name; all are listed.
    """
    known = {key.lower(): device for key, device in known_devices().items()}
    wanted = name.strip().lower().replace(" ", "-")
    if wanted in known:
        return known[wanted]
    close = difflib.get_close_matches(wanted, known, n=1)
    hint = f"did you mean {known[close[0]].name}? " if close else ""
    raise UsageError(f"the device {name!r} is unknown", fix=f"{hint}Known are {', '.join(known_devices())}")
