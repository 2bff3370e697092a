"""The settings of a fit, ready to paste: the commands of vLLM, of our engine, and of llama.cpp for a .gguf."""

from quantkit.capacity.fit import Demand, Fit
from quantkit.capacity.kv_footprint import KV_DTYPES, QUANTKIT
from quantkit.capacity.weight_schemes import SCHEME_BY_NAME

CHECKPOINT = "PATH/TO/CHECKPOINT"


def vllm_command(model: str, fit: Fit, demand: Demand, *, prefix_caching: bool) -> str | None:
    """``vllm serve ...``; None where vLLM has no such checkpoint or cache, or the demand does not run."""
    scheme, kv_dtype = SCHEME_BY_NAME.get(fit.scheme), KV_DTYPES[fit.kv_dtype]
    if fit.max_model_len is None or kv_dtype.vllm is None or (scheme is not None and scheme.gguf):
        return None
    parts = [
        f"vllm serve {model if fit.scheme in ('16-bit', 'as stored', 'FP8') else CHECKPOINT}",
        f"--max-model-len {fit.max_model_len}",
        f"--gpu-memory-utilization {fit.utilization:.2f}",
        f"--max-num-seqs {fit.max_num_seqs}",
        f"--max-num-batched-tokens {max(demand.max_num_batched_tokens, fit.max_num_seqs)}",
    ]
    if fit.scheme == "FP8":
        parts.append("--quantization fp8")
    if fit.tp > 1:
        parts.append(f"--tensor-parallel-size {fit.tp}")
    if kv_dtype.vllm != "auto":
        parts.append(f"--kv-cache-dtype {kv_dtype.vllm}")
    if prefix_caching:
        parts.append("--enable-prefix-caching")
    return " ".join(parts)


def llama_command(fit: Fit) -> str | None:
    """``llama-server ...`` for a .gguf; None for other schemes."""
    scheme = SCHEME_BY_NAME.get(fit.scheme)
    if scheme is None or scheme.gguf is None or fit.max_model_len is None:
        return None
    context = fit.max_model_len * fit.max_num_seqs
    return f"llama-server -m MODEL-{scheme.gguf}.gguf -c {context} --parallel {fit.max_num_seqs} -ngl 999"


def engine_command(model: str, fit: Fit, demand: Demand) -> str | None:
    """``quantkit serve ...``; None where the demand does not run or needs more than our engine has."""
    kv_dtype = {"16-bit": "auto", "int8": "int8"}.get(fit.kv_dtype)
    if fit.max_model_len is None or kv_dtype is None or fit.tp > 1 or fit.scheme == "FP8":
        return None
    parts = [
        f"quantkit serve {model if fit.scheme in ('16-bit', 'as stored') else CHECKPOINT}",
        f"--max-model-len {fit.max_model_len}",
        f"--max-num-seqs {fit.max_num_seqs}",
        f"--max-num-batched-tokens {max(demand.max_num_batched_tokens, fit.max_num_seqs)}",
        f"--kv-block-size {QUANTKIT.block_size}",
        f"--kv-cache-bytes {int(fit.kv_bytes)}",
    ]
    return " ".join(parts if kv_dtype == "auto" else [*parts, f"--kv-cache-dtype {kv_dtype}"])
