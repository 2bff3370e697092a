"""The specification of every operation, in plain torch: what each kernel must compute, and what it may be given.

A kernel is a faster body of the same name and signature. The checks stand here too, because the legal inputs are part
of the specification. One file a topic.
"""

from quantkit_kernels.reference.cache import CACHE_DTYPES, check_store_kv_cache, store_kv_cache
from quantkit_kernels.reference.matmul import (
    CODES_PER_WORD,
    PER_CHANNEL,
    check_int8,
    check_w4a16,
    dequantize,
    linear,
    pack_int4,
    quantize_input,
    unpack_int4,
    w4a16_gemm,
    w8a8_gemm,
    w8a16_gemm,
)

__all__ = [
    "CACHE_DTYPES",
    "CODES_PER_WORD",
    "PER_CHANNEL",
    "check_int8",
    "check_store_kv_cache",
    "check_w4a16",
    "dequantize",
    "linear",
    "pack_int4",
    "quantize_input",
    "store_kv_cache",
    "unpack_int4",
    "w4a16_gemm",
    "w8a8_gemm",
    "w8a16_gemm",
]
