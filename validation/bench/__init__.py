"""Benchmarks of fxopt with its peers beside it; `python -m validation.bench --help` lists them."""
