"""Up to how many rows a packed kernel is used, by the name of the device: ``crossover.json`` beside this file.

`python -m quantkit_kernels.crossover` measures an entry on the device at hand. An entry says where it comes from.
"""

import json
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

from quantkit_kernels.launches import BYTES_PER_SECOND, OPS_PER_SECOND

TABLE = Path(__file__).with_name("crossover.json")
DEFAULT = "default"
# Fractions of the roofline in the estimate: dequantizing on the way costs more than a dense product's loads do.
_PACKED_EFFICIENCY, _DENSE_EFFICIENCY, _MEMORY_EFFICIENCY = 0.4, 0.7, 0.85


@dataclass(frozen=True, slots=True)
class Crossover:
    """Most rows for each body; what has more rows is dequantized and multiplied densely.

    Attributes:
        w4a16_gemv_rows: 0 or 1, most rows for the matrix-vector body.
        w4a16_packed_rows: most rows for the packed body.
        w8a16_gemv_rows: as above, of 8-bit weights.
        w8a16_packed_rows: as above, of 8-bit weights.
        source: where the numbers come from, in words; begins with "estimate" or "measured".
    """

    w4a16_gemv_rows: int
    w4a16_packed_rows: int
    w8a16_gemv_rows: int
    w8a16_packed_rows: int
    source: str


def estimate_packed_rows(bits: int) -> int:
    """Rows from which dequantizing once costs less than multiplying slower, on an H200, a multiple of 128.

        packed: 2 M / (0.4 peak)  =  dequantize: (bits / 8 + 2 + 2) / (0.85 bandwidth), and then 2 M / (0.7 peak)

    for each weight; the dense copy is written once and read once.
    """
    peak = OPS_PER_SECOND["bf16"]
    seconds_per_row = 2 / (_PACKED_EFFICIENCY * peak) - 2 / (_DENSE_EFFICIENCY * peak)
    rows = (bits / 8 + 4) / (_MEMORY_EFFICIENCY * BYTES_PER_SECOND) / seconds_per_row
    return int(rows) // 128 * 128


@cache
def crossover(device_name: str) -> Crossover:
    """The entry of a device, as `torch.cuda.get_device_name` names it, or the default."""
    table = json.loads(TABLE.read_text())
    return Crossover(**table.get(device_name, table[DEFAULT]))


def write_crossover(device_name: str, entry: Crossover, path: Path = TABLE) -> None:
    """Put the entry of a device into a table; the other entries stay."""
    table = json.loads(path.read_text())
    table[device_name] = asdict(entry)
    path.write_text(json.dumps(table, indent=2) + "\n")
    crossover.cache_clear()
