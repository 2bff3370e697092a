"""The processor is measured through what the engine runs; figures are plausible, not fast."""

import pytest
import torch

from quantkit.capacity import measured_cpu
from quantkit.capacity.measured_cpu import measure_cpu
from quantkit.primitives import QuantizedWeight
from quantkit.serve.models.prepack import prepack
from quantkit_kernels import PreparedWeight


def test_a_processor_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "SHAPE": (256, 256),
        "COPIED_BYTES": 1 << 17,
        "READ_BYTES": 1 << 20,
        "STEPS": 2,
        "ROWS": (1, 4),
    }.items():
        monkeypatch.setattr(measured_cpu, name, value)
    prepared: set[torch.dtype] = set()

    def spy(weight: QuantizedWeight, activations: torch.dtype, input_scale: None) -> tuple[str, PreparedWeight, str]:
        prepared.add(activations)
        return prepack(weight, activations, input_scale)

    monkeypatch.setattr(measured_cpu, "prepack", spy)
    device = measure_cpu(repeats=1)
    assert device.name == "cpu"
    assert device.memory_bytes > 1e8
    assert device.bytes_per_s > 0
    assert set(device.measured) == {"16-bit", "weight-only"}
    assert [rows for rows, _ in device.measured["16-bit"].points] == [1, 4]
    assert min(seconds for found in device.measured.values() for _, seconds in found.points) > 0
    assert prepared == {torch.bfloat16}, "prepared for another type than the engine's: other bodies are measured"
    assert device.layer_seconds >= 0
    assert f"{torch.get_num_threads()} threads" in device.source
    assert device.products("int8", weight_only=False) is None
