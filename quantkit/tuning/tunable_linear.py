"""A quantized linear layer whose scales, and if asked whose codes, follow a gradient."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from quantkit.float16_scales import fits
from quantkit.primitives import QuantizedWeight, fake_quantize_input
from quantkit.scheme import QuantScheme

MAX_OFFSET = 1.0  # a code moves by one step at most
START_SHARE = 0.8  # of the way to the original weight at which an offset starts, if its code is the nearest
START_BEYOND = 0.2  # where it starts if error feedback has moved the code beyond the nearest one
BETAS = (0.9, 0.95)
_PIECE_NUMBERS = 1 << 16


@dataclass(slots=True)
class CodeOffsets:
    """Where each weight of a layer stands between two codes, and how it moves.

    A code is round(start + offset). Its gradient is that of the weight, as if rounding were not there; Adam's ratio of
    the mean to the root mean square decides how far it moves, so weights that are pushed the same way by most batches
    reach the next code and the others stay.

    Attributes:
        offset: [N, K] float16 in [-1, 1].
        momentum: [N, K] bfloat16 mean of the past gradients.
        square: [N, K] bfloat16 mean of their squares.
        steps: how many there were.
        learning_rate: of the next step, in codes; set by whoever drives the steps.

    Source: straight-through gradients for rounding: arXiv:1308.3432; Adam: arXiv:1412.6980.
    """

    offset: Tensor
    momentum: Tensor
    square: Tensor
    steps: int = 0
    learning_rate: float = 0.0

    @classmethod
    def start(cls, weight: QuantizedWeight, original: Tensor) -> "CodeOffsets":
        """Offsets part of the way from each code to the weight that it stands for, so that none moves yet."""
        exact = original.float() / _spread(weight.scale.float(), original.shape[1])
        if weight.zero_point is not None:
            exact += _spread(weight.zero_point.float(), original.shape[1])
        distance = exact - weight.codes
        near = distance.clamp(-0.5, 0.5) * START_SHARE
        offset = torch.where(distance.abs() <= 0.5, near, START_BEYOND * distance.sign())
        empty = torch.zeros_like(offset, dtype=torch.bfloat16)
        return cls(offset.half(), empty, empty.clone())

    def move(self, gradient: Tensor) -> None:
        """Take one step against ``gradient``, [N, K]."""
        if self.learning_rate == 0:
            return
        self.steps += 1
        correction = (1 - BETAS[1] ** self.steps) ** 0.5 / (1 - BETAS[0] ** self.steps)
        height = max(1, _PIECE_NUMBERS // gradient.shape[1])
        for start in range(0, gradient.shape[0], height):  # pieces that stay in a core's cache
            rows = slice(start, start + height)
            part = gradient[rows]
            mean = self.momentum[rows].float().lerp_(part, 1 - BETAS[0])
            self.momentum[rows] = mean
            square = self.square[rows].float().mul_(BETAS[1]).addcmul_(part, part, value=1 - BETAS[1])
            self.square[rows] = square
            mean.div_(square.sqrt_().clamp_(min=1e-20))
            moved = self.offset[rows].float().sub_(mean, alpha=self.learning_rate * correction)
            self.offset[rows] = moved.clamp_(-MAX_OFFSET, MAX_OFFSET)


class TunableLinear(nn.Module):
    """A linear layer that keeps its codes and multiplies by their weights as they would be stored.

    Args:
        weight: codes, scales, zero points.
        bias: [N] float32, or None; a parameter of its own.
        dtype: storage dtype of the scales: the product always sees scales that are rounded to it.
        input_scale: [1], of a scheme with static inputs.
        offsets: to let the codes move too.
        weight_dtype: in which a reader makes the weights of codes and scales: the product sees them rounded to it.

    Attributes:
        shift: [N, G] float32 parameter, the change of each scale relative to its start.
    """

    def __init__(
        self,
        weight: QuantizedWeight,
        bias: Tensor | None,
        dtype: torch.dtype,
        input_scale: Tensor | None = None,
        offsets: CodeOffsets | None = None,
        weight_dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.start, self.dtype, self.offsets, self.weight_dtype = weight, dtype, offsets, weight_dtype
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
        self.input_scale = input_scale
        self.base = weight.scale.float()
        self.shift = nn.Parameter(torch.zeros_like(self.base))
        self.out_features, self.in_features = weight.codes.shape

    def scale(self) -> Tensor:
        """[N, G] the present scales in storage dtype; one that would vanish, or leave float16, keeps its start."""
        moved, start = (self.base * (1 + self.shift.detach())).to(self.dtype), self.base.to(self.dtype)
        keeps = ~torch.isfinite(moved) | (moved == 0)
        if self.dtype == torch.bfloat16:  # which float16 does not hold at its ends
            keeps |= fits(start) & ~fits(moved)
        return torch.where(keeps, start, moved)

    def codes(self) -> Tensor:
        """[N, K] int8 the present codes."""
        if self.offsets is None:
            return self.start.codes
        scheme = self.start.scheme
        moved = self.offsets.offset.float().add_(self.start.codes).round_()
        return moved.clamp_(scheme.code_min, scheme.code_max).to(torch.int8)

    def quantized(self) -> QuantizedWeight:
        """The present weight as it would be stored."""
        return QuantizedWeight(self.codes(), self.scale(), self.start.scheme, self.start.zero_point)

    def as_read(self) -> Tensor:
        """[N, K] float32 the present weight as a reader of the checkpoint makes it."""
        return self.quantized().dequantize(self.weight_dtype).float()

    def forward(self, x: Tensor) -> Tensor:
        """[..., N] from [..., K] float32."""
        scheme: QuantScheme = self.start.scheme
        if scheme.input is not None:
            with torch.no_grad():
                rounding = fake_quantize_input(x, scheme.input, self.input_scale) - x
            x = x + rounding
        product: Tensor = _Product.apply(x, self.shift, self)
        return product if self.bias is None else product + self.bias


class _Product(torch.autograd.Function):
    """x @ W^T with W made from codes anew in each direction, so that no float weight is kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, shift: Tensor, layer: TunableLinear) -> Tensor:
        ctx.save_for_backward(x)
        ctx.layer = layer
        return x @ layer.as_read().T

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor, None]:
        (x,), layer = ctx.saved_tensors, ctx.layer
        gradient = gradients[0]
        for_x = gradient @ layer.as_read() if ctx.needs_input_grad[0] else None
        for_weight = gradient.flatten(0, -2).T @ x.flatten(0, -2)
        ones = torch.ones_like(layer.base)
        steps = QuantizedWeight(layer.codes(), ones, layer.start.scheme, layer.start.zero_point).dequantize()
        groups = (layer.base.shape[0], layer.base.shape[1], -1)
        for_scale = (for_weight.view(groups) * steps.view(groups)).sum(-1)
        if layer.offsets is not None:
            layer.offsets.move(for_weight.mul_(_spread(layer.base.sign(), for_weight.shape[1])))
        return for_x, for_scale * layer.base, None


def _spread(per_group: Tensor, columns: int) -> Tensor:
    """[N, K] from [N, G]."""
    return per_group.repeat_interleave(columns // per_group.shape[1], dim=1)
