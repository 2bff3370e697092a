"""The grid that loses least: scales of sub-blocks by weighted least squares, rounded to what a block stores, refitted.

Every step minimizes sum w (x - scale * level + minimum)^2, w being what the input column of a weight carries. Up to the
rounding of the scales it is llama.cpp's search. What llama.cpp does not do: after s and m are integers, codes, s, m, d
and dmin are fitted to each other again, and the best state that was seen is kept.

Source: make_qx_quants, make_qkx3_quants and make_qp_quants of ggml-quants.c for the trial scales.
"""

import torch
from torch import Tensor

from quantkit.formats.gguf.block_types import BlockType, Levels
from quantkit.formats.gguf.grid import Grid, safe_inverse, to_half

_PIECE_WEIGHTS = 1 << 17  # weights that are searched at once: their temporaries stay in the cache of a core
_REFITS = 2
_TRIALS = tuple(0.5 * step - 1.0 for step in range(8))  # levels by which the extreme overshoots: -1.0 ... 2.5
_SCALE_TRIALS = tuple(0.1 * step for step in range(-4, 5))


def search_grid(weight: Tensor, measure: Tensor, block_type: BlockType) -> Grid:
    """Choose the scales of every block.

    Args:
        weight: [R, K] float32, finite; K a multiple of the type's block.
        measure: [K] or [R, K] float32 > 0, what a squared error costs.
        block_type: of the grid.

    Returns:
        The grid as it will be stored.
    """
    rows, columns = weight.shape
    measure = measure.expand(rows, columns)
    step = max(1, _PIECE_WEIGHTS // columns)
    return Grid.join(
        [
            _search_rows(weight[start : start + step], measure[start : start + step], block_type)
            for start in range(0, rows, step)
        ]
    )


def _search_rows(weight: Tensor, measure: Tensor, block_type: BlockType) -> Grid:
    rows, shape = weight.shape[0], (-1, block_type.sub_blocks, block_type.sub_block)
    x, w = weight.reshape(shape), measure.reshape(shape)
    if block_type.has_minimum:
        scale, minimum = _search_affine(x, w, block_type.levels)
    else:
        scale, minimum = search_scale(x, w, block_type.levels, _TRIALS), None
    if block_type.scale_levels is None:
        scale, minimum = scale[:, 0], None if minimum is None else minimum[:, 0]
        d, dmin = to_half(scale), None if minimum is None else to_half(minimum)
        return Grid(d.reshape(rows, -1), None, None if dmin is None else dmin.reshape(rows, -1))
    blocks = _Blocks(x, w, block_type)
    blocks.round_scales(scale, minimum)
    for _ in range(_REFITS):
        blocks.refit()
    return blocks.grid(rows)


def search_scale(x: Tensor, w: Tensor, levels: Levels, trials: tuple[float, ...]) -> Tensor:
    """[...] scale of [..., g] values on levels without minimum, negative scales among them; 0 for nothing but zeros."""
    extreme = x.gather(-1, x.abs().argmax(-1, keepdim=True)).squeeze(-1)
    weighted = x * w
    best_gain, best = torch.zeros_like(extreme), torch.zeros_like(extreme)

    def consider(inverse: Tensor) -> None:
        nonlocal best_gain, best
        trial = levels.nearest(x * inverse.unsqueeze(-1))
        product = (weighted * trial).sum(-1)
        energy = (trial.square_() * w).sum(-1)
        scale = product * safe_inverse(energy)
        gain = scale * product
        better = gain > best_gain
        best_gain, best = torch.where(better, gain, best_gain), torch.where(better, scale, best)

    signs = (1.0, -1.0) if levels.low < 0 and len(levels.values) <= 32 else (1.0,)
    for sign in signs:
        for overshoot in trials:
            consider(sign * (levels.peak + (overshoot if levels.peak > 0 else -overshoot)) * safe_inverse(extreme))
    consider(safe_inverse(best))
    return best


def _search_affine(x: Tensor, w: Tensor, levels: Levels) -> tuple[Tensor, Tensor]:
    """[...] scale >= 0 and minimum >= 0 of [..., g] values: x is about scale * level - minimum."""
    low = x.amin(-1).clamp_(max=0)
    span = x.amax(-1) - low
    weighted = x * w
    sum_w, sum_x = w.sum(-1), weighted.sum(-1)
    best_gain = sum_x.square() / sum_w  # of a scale of 0
    best_scale, best_minimum = torch.zeros_like(low), (-sum_x / sum_w).clamp_(min=0)
    best_gain = torch.where(best_minimum > 0, best_gain, 0.0)

    def consider(inverse: Tensor, minimum: Tensor) -> None:
        nonlocal best_gain, best_scale, best_minimum
        trial = levels.nearest((x + minimum.unsqueeze(-1)).mul_(inverse.unsqueeze(-1)))
        sum_xl = (weighted * trial).sum(-1)
        scaled = trial * w
        sum_l, sum_ll = scaled.sum(-1), scaled.mul_(trial).sum(-1)
        determinant = sum_w * sum_ll - sum_l.square()
        solve = torch.where(determinant > 1e-6 * sum_w * sum_ll, 1 / determinant, 0.0)
        scale, offset = (sum_w * sum_xl - sum_x * sum_l) * solve, (sum_ll * sum_x - sum_l * sum_xl) * solve
        through_zero = (offset > 0) | (solve == 0)
        scale = torch.where(through_zero, sum_xl * safe_inverse(sum_ll), scale)
        offset = torch.where(through_zero, 0.0, offset)
        gain = scale * sum_xl + offset * sum_x
        better = (gain > best_gain) & (scale >= 0)
        best_gain = torch.where(better, gain, best_gain)
        best_scale, best_minimum = torch.where(better, scale, best_scale), torch.where(better, -offset, best_minimum)

    for overshoot in _TRIALS:
        consider((levels.high + overshoot) * safe_inverse(span), -low)
    consider(safe_inverse(best_scale), best_minimum)
    return best_scale, best_minimum


class _Blocks:
    """The blocks of a two-level type while their scales are fitted.

    Args:
        x: [n, S, g] weights.
        w: [n, S, g] what a squared error costs.
        block_type: with minimum or without.
    """

    def __init__(self, x: Tensor, w: Tensor, block_type: BlockType) -> None:
        assert block_type.scale_levels is not None
        self.x, self.w, self.levels = x, w, block_type.levels
        self.scale_levels: Levels = block_type.scale_levels
        self.d = self.s = self.dmin = self.m = torch.empty(0)
        self.has_minimum = block_type.has_minimum
        self.best: tuple[Tensor, ...] = ()
        self.error = torch.empty(0)

    def round_scales(self, scale: Tensor, minimum: Tensor | None) -> None:
        """Take [n, S] scales and minima over as integers times d and dmin."""
        trial = self._nearest(scale, minimum)
        self.d = to_half(search_scale(scale, (trial.square_() * self.w).sum(-1), self.scale_levels, _SCALE_TRIALS))
        self.s = self.scale_levels.nearest(scale * safe_inverse(self.d).unsqueeze(-1))
        if minimum is not None:
            self.dmin = to_half(search_scale(minimum, self.w.sum(-1), self.scale_levels, _SCALE_TRIALS))
            self.m = self.scale_levels.nearest(minimum * safe_inverse(self.dmin).unsqueeze(-1))
        self.trial = self._nearest(self._scale(), self._minimum())
        self._keep_best(first=True)

    def _scale(self) -> Tensor:
        return self.d.unsqueeze(-1) * self.s

    def _minimum(self) -> Tensor | None:
        return self.dmin.unsqueeze(-1) * self.m if self.has_minimum else None

    def _nearest(self, scale: Tensor, minimum: Tensor | None) -> Tensor:
        shifted = self.x if minimum is None else self.x + minimum.unsqueeze(-1)
        return self.levels.nearest(shifted * safe_inverse(scale).unsqueeze(-1))

    def refit(self) -> None:
        """Fit s and m to the codes, then d and dmin, then the codes."""
        weighted = self.trial * self.w
        sum_ll, sum_xl = (weighted * self.trial).sum(-1), (weighted * self.x).sum(-1)
        if not self.has_minimum:
            self.s = self.scale_levels.nearest(sum_xl * safe_inverse(sum_ll * self.d.unsqueeze(-1)))
            self.d = to_half((self.s * sum_xl).sum(-1) * safe_inverse((self.s.square() * sum_ll).sum(-1)))
        else:
            sum_l, sum_x, sum_w = weighted.sum(-1), (self.w * self.x).sum(-1), self.w.sum(-1)
            minimum = self._minimum()
            assert minimum is not None
            self.s = self.scale_levels.nearest((sum_xl + minimum * sum_l) * safe_inverse(sum_ll * self.d.unsqueeze(-1)))
            self.m = self.scale_levels.nearest(
                (self._scale() * sum_l - sum_x) * safe_inverse(sum_w * self.dmin.unsqueeze(-1))
            )
            a, b = (self.s.square() * sum_ll).sum(-1), (self.s * self.m * sum_l).sum(-1)
            c = (self.m.square() * sum_w).sum(-1)
            u, v = (self.s * sum_xl).sum(-1), (self.m * sum_x).sum(-1)
            determinant = a * c - b.square()
            solvable = determinant > 1e-6 * a * c
            solve = torch.where(solvable, 1 / determinant, 0.0)
            d, dmin = (u * c - b * v) * solve, (u * b - a * v) * solve
            usable = solvable & (d >= 0) & (dmin >= 0)
            self.d = torch.where(usable, to_half(d), self.d)
            self.dmin = torch.where(usable, to_half(dmin), self.dmin)
        self.trial = self._nearest(self._scale(), self._minimum())
        self._keep_best()

    def _keep_best(self, *, first: bool = False) -> None:
        """Note the present state where its error is the least so far."""
        fitted = self.trial * self._scale().unsqueeze(-1)
        minimum = self._minimum()
        if minimum is not None:
            fitted -= minimum.unsqueeze(-1)
        error = (fitted.sub_(self.x).square_().mul_(self.w)).sum((-1, -2))
        state = (self.d, self.s, *((self.dmin, self.m) if self.has_minimum else ()))
        if first:
            self.error, self.best = error, state
            return
        better = error < self.error
        self.error = torch.where(better, error, self.error)
        self.best = tuple(
            torch.where(better if new.dim() == 1 else better.unsqueeze(-1), new, old)
            for new, old in zip(state, self.best, strict=True)
        )

    def grid(self, rows: int) -> Grid:
        """The best state."""
        return Grid(*(part.unflatten(0, (rows, -1)) for part in self.best))
