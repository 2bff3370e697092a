"""Numbers to 8-bit codes inside a Triton kernel; the arithmetic of `reference.quantize_input`, to the bit."""

import triton
import triton.language as tl


@triton.jit
def scale_of(wide, AXIS: tl.constexpr):  # type: ignore[no-untyped-def]
    """A 127th of the largest magnitude along an axis of float32, 1 for zeros, NaN where one is NaN.

    Magnitudes are compared as bit patterns, whose order is theirs and in which NaN is the largest: a maximum of floats
    passes over it.
    """
    largest = tl.max(wide.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=AXIS).to(tl.float32, bitcast=True)
    scale = tl.div_rn(largest, tl.zeros_like(largest) + 127.0)
    return tl.where(scale == 0.0, 1.0, scale)


@triton.jit
def codes_of(wide, scale):  # type: ignore[no-untyped-def]
    """int8 of float32 divided by a scale of the same shape: to nearest, ties to even, by adding 1.5 * 2**23."""
    scaled = tl.minimum(tl.maximum(tl.div_rn(wide, scale), -128.0), 127.0)
    return ((scaled + 12582912.0) - 12582912.0).to(tl.int8)
