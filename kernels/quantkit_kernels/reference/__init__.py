"""The specification of every operation, in plain torch: what each kernel must compute, and what it may be given.

A kernel is a faster body of the same name and signature. The checks stand here too, because the legal inputs are part
of the specification. One file a topic.
"""

from quantkit_kernels.reference.activation import check_gated, gelu_mul, silu_mul
from quantkit_kernels.reference.attention import (
    BLOCK_SIZES,
    HEAD_DIM_STEP,
    MAX_HEAD_DIM,
    check_paged_attention,
    paged_attention,
)
from quantkit_kernels.reference.cache import CACHE_DTYPES, check_store_kv_cache, store_kv_cache
from quantkit_kernels.reference.calibration import (
    MAX_BLOCK_SIZE,
    check_gptq_columns,
    check_hessian_accumulate,
    gptq_columns,
    hessian_accumulate,
)
from quantkit_kernels.reference.matmul import (
    CODES_PER_WORD,
    PER_CHANNEL,
    check_bias,
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
from quantkit_kernels.reference.norm import check_rms_norm, rms_norm
from quantkit_kernels.reference.quantize import (
    check_quantize_per_token,
    quantize_per_token,
    rms_norm_quantize,
    silu_mul_quantize,
)
from quantkit_kernels.reference.rotary import check_rotary_embedding, rotary_embedding
from quantkit_kernels.reference.sampling import (
    apply_token_bitmask,
    check_sample_tokens,
    check_token_bitmask,
    sample_tokens,
)

__all__ = [
    "BLOCK_SIZES",
    "CACHE_DTYPES",
    "CODES_PER_WORD",
    "HEAD_DIM_STEP",
    "MAX_BLOCK_SIZE",
    "MAX_HEAD_DIM",
    "PER_CHANNEL",
    "apply_token_bitmask",
    "check_bias",
    "check_gated",
    "check_gptq_columns",
    "check_hessian_accumulate",
    "check_int8",
    "check_paged_attention",
    "check_quantize_per_token",
    "check_rms_norm",
    "check_rotary_embedding",
    "check_sample_tokens",
    "check_store_kv_cache",
    "check_token_bitmask",
    "check_w4a16",
    "dequantize",
    "gelu_mul",
    "gptq_columns",
    "hessian_accumulate",
    "linear",
    "pack_int4",
    "paged_attention",
    "quantize_input",
    "quantize_per_token",
    "rms_norm",
    "rms_norm_quantize",
    "rotary_embedding",
    "sample_tokens",
    "silu_mul",
    "silu_mul_quantize",
    "store_kv_cache",
    "unpack_int4",
    "w4a16_gemm",
    "w8a8_gemm",
    "w8a16_gemm",
]
