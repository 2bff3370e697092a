"""Parts of bench_quantize.py."""
