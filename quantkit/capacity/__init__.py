"""Capacity planning: what a model needs and how fast it can be, from its configuration and headers alone.

No weight is read and, without a measured device or a trace, torch is not imported.
"""
