"""Where aten's int4pack format puts each code on this machine, found by packing known numbers.

`aten._convert_weight_to_int4pack_for_cpu` chooses its layout by the vector instructions of the CPU that it runs on and
documents none. The layouts that exist (AVX-512, AVX2, neither) have the same frame: panels of `width` weight rows, in a
panel width / 2 bytes for each input column, in a byte the codes of two rows. What differs is the width, and which rows.
So a panel is packed here whose codes spell their own row numbers, and the order is read off.
"""

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

ROW_MULTIPLE = 16  # aten packs weights whose N is a multiple of this
PANEL_WIDTHS = (64, 32)


@dataclass(frozen=True, slots=True)
class Panel:
    """The layout of panels of one width.

    Attributes:
        width: weight rows in a panel.
        rows: for each code of an input column, low nibbles of all bytes first and then the high ones, its row in the
            panel; None if that is simply 0, 1, 2, ...
    """

    width: int
    rows: Tensor | None


@cache
def probe_panel(width: int) -> Panel | None:
    """The layout of a weight of ``width`` rows if it is one panel as described above, else None."""
    columns = 4
    numbers = torch.arange(width, dtype=torch.int32)
    found = torch.zeros(columns, 2, width // 2, dtype=torch.int64)
    for digit in range(2):  # the row number in base 16
        packed = _pack(((numbers >> (4 * digit)) & 15).unsqueeze(1).expand(width, columns))
        found += _nibbles(packed, columns) << (4 * digit)
    rows = found[0].flatten()
    if not bool((found == found[0]).all()) or not torch.equal(rows.sort().values, numbers.long()):
        return None
    by_column = _nibbles(_pack(torch.arange(columns, dtype=torch.int32).expand(width, columns)), columns)
    if not bool((by_column == torch.arange(columns).view(-1, 1, 1)).all()):
        return None
    return Panel(width, None if torch.equal(rows, numbers.long()) else rows)


@cache
def panel_width() -> int | None:
    """Rows in a full panel on this machine: the widest width that splits a larger weight into independent panels."""
    for width in PANEL_WIDTHS:
        weight = torch.randint(0, 16, (2 * width, 8), dtype=torch.int32, generator=torch.Generator().manual_seed(0))
        halves = torch.cat([_pack(weight[:width]).flatten(), _pack(weight[width:]).flatten()])
        if probe_panel(width) is not None and torch.equal(_pack(weight).flatten(), halves):
            return width
    return None


def split_panels(out_features: int) -> list[tuple[int, Panel]] | None:
    """The runs of panels of a weight: [(number of panels, their layout)]; None if the layout is not understood."""
    width = panel_width()
    if width is None:
        return None
    runs: list[tuple[int, Panel]] = []
    for count, size in ((out_features // width, width), (1, out_features % width)):
        if count and size:
            panel = probe_panel(size)
            if panel is None:
                return None
            runs.append((count, panel))
    return runs


def _pack(codes: Tensor) -> Tensor:
    return torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes.contiguous(), 1)


def _nibbles(packed: Tensor, columns: int) -> Tensor:
    """[columns, 2, width / 2] low and high codes of the bytes of one panel."""
    panel = packed.flatten().view(columns, -1)
    return torch.stack([panel & 15, panel >> 4], dim=1).long()
