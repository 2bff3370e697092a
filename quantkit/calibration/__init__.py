"""Calibration: what is fed through the model, and what is kept of it."""
