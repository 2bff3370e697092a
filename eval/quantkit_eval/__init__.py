"""Evaluation of language models before and after quantization: suites, statistics, verdict and report.

Knows models only through ``quantkit_eval.protocol.Model`` and hands everything on as files (``quantkit_eval.records``).
"""
