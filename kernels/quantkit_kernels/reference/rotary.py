"""rotary_embedding: turn pairs of a head's numbers by an angle that grows with the token's place."""

from torch import Tensor

from quantkit_kernels.reference.arguments import FLOATING, check_argument


def check_rotary_embedding(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Raise ValueError, with the allowed values, unless the arguments of `rotary_embedding` fit together."""
    check_argument("q", q, FLOATING, ("T", "H", "D"))
    tokens, _, head_dim = q.shape
    check_argument("k", k, (q.dtype,), (tokens, "H_kv", head_dim), q.device)
    check_argument("cos", cos, FLOATING, (tokens, "rot / 2"), q.device)
    check_argument("sin", sin, (cos.dtype,), tuple(cos.shape), q.device)
    if not 1 <= cos.shape[1] <= head_dim // 2:
        raise ValueError(f"cos has {cos.shape[1]} columns, allowed is 1 to {head_dim // 2}, half of D={head_dim}")


def rotary_embedding(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False) -> None:
    """Turn queries and keys, in place, in float32, rounded once.

        (first, second) of pair i becomes (first * cos[i] - second * sin[i], second * cos[i] + first * sin[i])

    Args:
        q: [T, H, D], unit stride along D, float32, bfloat16 or float16.
        k: [T, H_kv, D], same type.
        cos: [T, rot / 2] of any of these types; numbers of a head from ``rot`` on stay as they are.
        sin: like cos.
        interleaved: pair i is numbers 2i and 2i + 1; otherwise i and rot / 2 + i.

    Raises:
        ValueError: shapes, types, strides or devices that do not fit.

    Source: arXiv:2104.09864, equation 34.
    """
    check_rotary_embedding(q, k, cos, sin)
    half = cos.shape[1]
    wide_cos, wide_sin = cos.float().unsqueeze(1), sin.float().unsqueeze(1)
    for heads in (q, k):
        if interleaved:
            first, second = heads[..., : 2 * half : 2], heads[..., 1 : 2 * half : 2]
        else:
            first, second = heads[..., :half], heads[..., half : 2 * half]
        a, b = first.float(), second.float()
        turned = a * wide_cos - b * wide_sin, b * wide_cos + a * wide_sin
        first.copy_(turned[0])
        second.copy_(turned[1])
