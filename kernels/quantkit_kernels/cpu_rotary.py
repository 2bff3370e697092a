"""CPU body of rotary_embedding: queries and keys that lie side by side, as in one projection, are turned together."""

from torch import Tensor


def rotary_embedding(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False) -> None:
    """As `reference.rotary_embedding`; arguments that do not fit are refused by torch, or not at all.

    Precision: float32, rounded once.
    """
    half = cos.shape[1]
    cos, sin = cos.float().unsqueeze(1), sin.float().unsqueeze(1)
    for heads in side_by_side(q, k):
        if interleaved:
            first, second = heads[..., : 2 * half : 2], heads[..., 1 : 2 * half : 2]
        else:
            first, second = heads[..., :half], heads[..., half : 2 * half]
        a, b = first.float(), second.float()  # no copies if they are float32
        turned = (a * cos).addcmul_(b, sin, value=-1)
        second.copy_(b * cos + a * sin) if b is not second else second.mul_(cos).addcmul_(a, sin)
        first.copy_(turned)


def side_by_side(q: Tensor, k: Tensor) -> tuple[Tensor, ...]:
    """One view of the heads of both, [T, H + H_kv, D], if they are views of the same rows; else the two."""
    tokens, num_heads, head_dim = q.shape
    token_stride, head_stride, _ = q.stride()
    if k.stride() != q.stride() or k.data_ptr() - q.data_ptr() != num_heads * head_stride * q.element_size():
        return q, k
    if q.untyped_storage().data_ptr() != k.untyped_storage().data_ptr():
        return q, k
    return (q.as_strided((tokens, num_heads + k.shape[1], head_dim), (token_stride, head_stride, 1)),)
