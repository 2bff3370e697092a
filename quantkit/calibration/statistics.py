"""What algorithms and transforms know of a layer's inputs: second moment, size of each column, range of all."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from quantkit.calibration.input_range import MagnitudeHistogram
from quantkit.calibration.original_stream import OriginalStream
from quantkit_kernels import hessian_accumulate
from quantkit_kernels.dispatch import triton_blocker

CPU = torch.device("cpu")
_TILE = 256  # columns of a tile of the symmetric product; smaller tiles skip more of the lower half but run slower
SAMPLE_TOKENS = 512  # tokens kept as they are, for trials that need inputs and not only their moments


def add_gram(total: Tensor, x: Tensor) -> None:
    """Add ``x.T @ x`` to the upper triangle (by tiles) of ``total``, in place.

    Only tiles on and above the diagonal are computed: for K = 1536 that is 58 % of the work of the full product. On a
    GPU that is one kernel, which multiplies 16-bit inputs as they are: products of those are exact in float32.

    Args:
        total: [K, K] float32; tiles below the diagonal are left alone.
        x: [M, K] floating.
    """
    if triton_blocker(x.device) is None:
        hessian_accumulate(x, total)
        return
    x = x.float()
    columns = x.shape[1]
    for start in range(0, columns, _TILE):
        stop = min(start + _TILE, columns)
        total[start:stop, start:].addmm_(x[:, start:stop].T, x[:, start:])


@dataclass(frozen=True, slots=True)
class Wanted:
    """What of the inputs is to be collected; nothing else costs time or memory.

    Attributes:
        gram: the second moment, for Hessians.
        held_out: of the windows set aside a second moment of their own, which only judges.
        columns: mean square, mean and largest absolute value of each column.
        histogram: of the absolute values of all columns together.
        sample: a few hundred tokens as they are.
        original: the original model's inputs beside these.
    """

    gram: bool = False
    held_out: bool = False
    columns: bool = False
    histogram: bool = False
    sample: bool = False
    original: bool = False

    def __or__(self, other: "Wanted") -> "Wanted":
        """What either of them wants."""
        return Wanted(*(getattr(self, name) or getattr(other, name) for name in self.__slots__))

    def __bool__(self) -> bool:
        return any(getattr(self, name) for name in self.__slots__)


@dataclass(slots=True)
class InputStatistics:
    """Running statistics of the inputs that one or more layers share. Masked tokens count nowhere.

    Attributes:
        in_features: K.
        wanted: what is collected.
        num_tokens: tokens added so far, those of held-out windows among them.
        num_held_out: tokens of held-out windows.
        histogram: of |x|; None unless wanted.
        original: these inputs beside the original model's; None unless wanted.
        device: where the inputs come from, and where all but the histogram is kept.
    """

    in_features: int
    wanted: Wanted = Wanted(gram=True)
    num_tokens: int = 0
    num_held_out: int = 0
    histogram: MagnitudeHistogram | None = None
    original: OriginalStream | None = None
    device: torch.device = CPU
    _gram: Tensor | None = None
    _held_out: Tensor | None = None
    _sum_abs: Tensor | None = None
    _sum_square: Tensor | None = None
    _absmax: Tensor | None = None
    _sample: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        size, device = self.in_features, self.device
        if self.wanted.gram:
            self._gram = torch.zeros(size, size, device=device)
        if self.wanted.held_out:
            self._held_out = torch.zeros(size, size, device=device)
        if self.wanted.columns:
            self._sum_abs, self._sum_square = (
                torch.zeros(size, dtype=torch.float64, device=device),
                torch.zeros(size, dtype=torch.float64, device=device),
            )
            self._absmax = torch.zeros(size, device=device)
        if self.wanted.histogram:
            self.histogram = MagnitudeHistogram()
        if self.wanted.original:
            self.original = OriginalStream(size, device)

    def add(self, x: Tensor, token_mask: Tensor | None = None, held_out: Tensor | None = None) -> None:
        """Count the tokens of ``x``.

        Args:
            x: [..., K] inputs of the layer.
            token_mask: [...] bool, False where a token is padding; None counts all.
            held_out: [...] bool, True for tokens of windows that only judge; None for none.

        Raises:
            FloatingPointError: the inputs are not finite; the model overflows before this layer.
        """
        rows = x.reshape(-1, self.in_features)
        keep = None if token_mask is None or bool(token_mask.all()) else token_mask.reshape(-1)
        rows = rows if keep is None else rows[keep]
        wide = rows.float()
        if not torch.isfinite(wide.sum()):
            raise FloatingPointError("the inputs contain NaN or infinity")
        self.num_tokens += rows.shape[0]
        self._add_columns(wide)
        rows = wide if rows.device.type == "cpu" else rows  # widened once for all
        if self._held_out is not None and held_out is not None and bool(held_out.any()):
            judges = held_out.reshape(-1) if keep is None else held_out.reshape(-1)[keep]
            apart = rows[judges]
            self.num_held_out += apart.shape[0]
            add_gram(self._held_out, apart)
            rows = rows[~judges]
        if self._gram is not None:
            add_gram(self._gram, rows)

    def add_original(
        self,
        x: Tensor,
        original: Tensor,
        token_mask: Tensor | None = None,
        held_out: Tensor | None = None,
        source: Tensor | None = None,
    ) -> None:
        """Count the tokens of ``x`` beside the original model's.

        Args:
            x: [..., K] inputs of the layer.
            original: [..., K] inputs of the same layer and the same tokens in the original model.
            token_mask: [...] bool, False where a token is padding; None counts all.
            held_out: [...] bool, True for tokens of windows that only judge; None for none.
            source: [...] int64, the number of the calibration source of each token; None for one source.
        """
        assert self.original is not None, "the original stream was not asked for"
        shape = x.shape[:-1] if token_mask is None else token_mask.shape  # experts get their tokens in one row
        keep = slice(None) if token_mask is None else token_mask.reshape(-1)
        self.original.add(
            x.reshape(-1, self.in_features)[keep].float(),
            original.reshape(-1, self.in_features)[keep],
            None if held_out is None else held_out.expand(shape).reshape(-1)[keep],
            None if source is None else source.expand(shape).reshape(-1)[keep],
        )

    def _add_columns(self, rows: Tensor) -> None:
        if self._sum_abs is not None and rows.shape[0]:
            assert self._sum_square is not None
            assert self._absmax is not None
            size = rows.abs()
            self._sum_abs += size.sum(0)
            self._absmax = torch.maximum(self._absmax, size.amax(0))
            self._sum_square += size.square_().sum(0)
        if self.histogram is not None:
            self.histogram.add(rows)
        if self.wanted.sample and rows.shape[0]:
            self._sample.append(rows[:: max(1, rows.shape[0] // 64)][:64].clone())

    def hessian(self) -> Tensor:
        """[K, K] float64 symmetric mean of x x^T over all tokens.

        The literature's factor 2 cancels in every use.
        """
        assert self._gram is not None, "the second moment was not collected"
        gram = self._gram if self._held_out is None else self._gram + self._held_out
        return _symmetric(gram, self.num_tokens)

    def fit_hessian(self) -> Tensor:
        """The same over the tokens that are not held out; over all where nothing is."""
        assert self._gram is not None, "the second moment was not collected"
        return _symmetric(self._gram, self.num_tokens - self.num_held_out)

    def judge(self) -> tuple[Tensor, str]:
        """The [K, K] float32 second moment that decides between candidates, and which tokens it is of.

        Held-out windows judge. Where there are none (a single window) the calibration tokens judge themselves.
        """
        if self._held_out is not None and self.num_held_out:
            return _symmetric(self._held_out, self.num_held_out).float(), "held-out windows"
        return self.hessian().float(), "calibration windows"

    @property
    def mean_square(self) -> Tensor:
        """[K] float32 mean of x^2 in each column."""
        if self._sum_square is not None:
            return (self._sum_square / max(self.num_tokens, 1)).float()
        return self.hessian().diagonal().float()

    @property
    def mean_abs(self) -> Tensor:
        """[K] float32 mean of |x| in each column."""
        assert self._sum_abs is not None, "column sizes were not collected"
        return (self._sum_abs / max(self.num_tokens, 1)).float()

    @property
    def absmax(self) -> Tensor:
        """[K] float32 largest |x| of each column."""
        assert self._absmax is not None, "column sizes were not collected"
        return self._absmax

    @property
    def sample(self) -> Tensor:
        """[S, K] float32 tokens as they are, evenly taken; S is at most ``SAMPLE_TOKENS``."""
        rows = torch.cat(self._sample) if self._sample else torch.zeros(0, self.in_features, device=self.device)
        return rows[:: max(1, -(-rows.shape[0] // SAMPLE_TOKENS))]


def _symmetric(gram: Tensor, num_tokens: int) -> Tensor:
    """Both triangles in float64, divided by the number of tokens; the lower is written over, tile by tile."""
    full = gram.double().div_(max(num_tokens, 1))
    for start in range(0, len(full), _TILE):
        stop = min(start + _TILE, len(full))
        tile = full[start:stop, start:stop].triu()
        full[start:stop, start:stop] = tile + tile.triu(1).T
        full[stop:, start:stop] = full[start:stop, stop:].T
    return full
