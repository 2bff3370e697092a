"""Tuning of a quantized model against the original: what is stored as a float moves, codes stay unless asked."""
