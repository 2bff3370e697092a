"""The model that a recipe names: a hub id, a folder or a .gguf file, read lazily."""

from quantkit.source.model_source import ModelSource, TensorInfo, open_model, open_source

__all__ = ["ModelSource", "TensorInfo", "open_model", "open_source"]
