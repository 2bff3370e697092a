"""Models as GGUF files, for llama.cpp and what is built on it."""

from quantkit.export_gguf.export import export_gguf

__all__ = ["export_gguf"]
