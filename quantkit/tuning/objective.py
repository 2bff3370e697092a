"""The distance that tuning lowers: KL from the original's next-token distribution, a few rows of logits at a time."""

from collections.abc import Callable

import torch
from torch import Tensor

LOGITS = 6 << 20  # numbers in memory at once, for each of the two models

Head = Callable[[Tensor], Tensor]


def rows_at_once(vocab_size: int) -> int:
    """How many rows of logits are made at a time."""
    return max(1, LOGITS // vocab_size)


def kl_rows(teacher: Tensor, student: Tensor) -> Tensor:
    """[R] KL in nats of each row, from [R, V] logits of the original and of the model that is tuned."""
    original = torch.log_softmax(teacher.float(), -1)
    return (original.exp() * (original - torch.log_softmax(student.float(), -1))).sum(-1)


def backward_through_head(
    hidden: Tensor, target: Tensor, counted: Tensor, teacher_head: Head, student_head: Head, at_once: int
) -> tuple[float, Tensor]:
    """Mean KL over the counted tokens and its gradient with respect to the last block's output.

    Gradients of the parameters inside ``student_head`` are added to their ``grad`` on the way. The logits of all
    tokens never exist together.

    Args:
        hidden: [T, hidden] output of the tuned model's last block.
        target: [T, hidden] output of the original's last block.
        counted: [T] bool, the tokens that count; at least one.
        teacher_head: [T, hidden] -> [T, V] logits of the original.
        student_head: the same of the tuned model.
        at_once: rows of logits in memory.

    Returns:
        Mean KL in nats, and the gradient [T, hidden].
    """
    gradient = torch.zeros_like(hidden)
    rows = counted.nonzero().flatten()
    total = 0.0
    for part in rows.split(at_once):
        with torch.no_grad():
            teacher = teacher_head(target[part].float())
        leaf = hidden.detach()[part].requires_grad_()
        loss = kl_rows(teacher, student_head(leaf)).sum() / len(rows)
        loss.backward()
        assert leaf.grad is not None
        gradient[part] = leaf.grad
        total += float(loss.detach())
    return total, gradient


@torch.no_grad()
def kl_of_tokens(
    hidden: Tensor, target: Tensor, teacher_head: Head, student_head: Head, at_once: int
) -> tuple[Tensor, Tensor]:
    """KL of every token in nats, and whether both models put the same token first: [T] float32 and [T] bool.

    Arguments as for `backward_through_head`.
    """
    distances, agrees = [], []
    for start in range(0, len(hidden), at_once):
        part = slice(start, start + at_once)
        teacher, student = teacher_head(target[part].float()), student_head(hidden[part])
        distances.append(kl_rows(teacher, student))
        agrees.append(teacher.argmax(-1) == student.argmax(-1))
    return torch.cat(distances), torch.cat(agrees)
