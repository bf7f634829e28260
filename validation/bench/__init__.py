"""Benchmarks of fxopt and its peers; `python -m validation.bench --help` lists them."""
