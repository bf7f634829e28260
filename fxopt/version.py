"""The version of fxopt: the one place that says it."""

__version__ = "0.1.0"
