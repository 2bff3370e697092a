"""A model as the suites of a search ask it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quantkit.gate import engine_config
from quantkit.serve import Engine
from quantkit.serve.device import DeviceName
from quantkit.source import ModelSource
from quantkit.text_model import EngineTextModel


def serve(
    target: ModelSource | Path, source: ModelSource, device: DeviceName, suites: Mapping[str, Mapping[str, Any]]
) -> EngineTextModel:
    """An engine with the settings of the gate.

    Args:
        target: the original, or a checkpoint of it.
        source: the original.
        device: where it runs.
        suites: the whole of what the certification asks, so that screening and certification run alike.
    """
    return EngineTextModel(Engine(target, engine_config(source, device, suites)))
