"""The HTTP server: OpenAI's interface over the engine (the extra ``serve``)."""
