"""The engine that runs a model before and after quantization: paged cache, continuous batching, packed weights."""

from quantkit.serve.config import EngineConfig
from quantkit.serve.engine import Engine
from quantkit.serve.evaluated import EngineModel
from quantkit.serve.outputs import Completion, RequestOutput
from quantkit.serve.sampling_params import SamplingParams

__all__ = ["Completion", "Engine", "EngineConfig", "EngineModel", "RequestOutput", "SamplingParams"]
