"""The parts of ``structured_chat``: values, texts that state them, requests, and one module for each kind of task."""
