"""Which schemes each format can hold, in words; no torch, because recipes are checked with it."""

from quantkit.scheme import PER_CHANNEL, QuantScheme

FORMATS = ("compressed-tensors", "gptq", "awq")
HOLDS = {
    "compressed-tensors": "4 and 8 bits, symmetric and asymmetric, with 16-bit inputs; 8 bits symmetric per channel "
    "with 8-bit inputs",
    "gptq": "4 and 8 bits, symmetric and asymmetric, with 16-bit inputs",
    "awq": "4 bits in groups of 32, 64 or 128, symmetric and asymmetric, with 16-bit inputs, one scheme for all layers",
}


def why_not(form: str, scheme: QuantScheme) -> str | None:
    """Why a format cannot hold a scheme; None if it can.

    Args:
        form: a name of ``FORMATS``.
        scheme: how a layer is quantized.
    """
    holds = scheme.num_bits in (4, 8)
    if scheme.input is not None:
        per_channel = scheme.num_bits == 8 and scheme.symmetric and scheme.group_size == PER_CHANNEL
        holds = form == "compressed-tensors" and per_channel
    elif form == "awq":
        holds = scheme.num_bits == 4 and scheme.group_size != PER_CHANNEL
    return None if holds else f"{form} cannot hold {scheme}; it holds {HOLDS[form]}"


def why_not_experts(form: str, scheme: QuantScheme) -> str | None:
    """What engines have against experts of a mixture that a format holds in a scheme; None if nothing.

    Args:
        form: a name of ``FORMATS``.
        scheme: of all experts of a layer.

    Source: vLLM, quantization/compressed_tensors/compressed_tensors_moe.
    """
    if form != "compressed-tensors":
        return None
    if not scheme.symmetric:
        return "vLLM reads no zero points of experts from compressed-tensors"
    if scheme.input is not None and not scheme.input.dynamic:
        return "vLLM takes experts with dynamic 8-bit inputs only"
    return None
