"""Models that the engine runs: transformers' own classes, with our attention and our matrix products inside."""
