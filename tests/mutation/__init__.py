"""Planted faults: does a test see each of them? `python -m tests.mutation`."""
