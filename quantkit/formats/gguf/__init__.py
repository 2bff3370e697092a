"""The GGUF format of llama.cpp."""
