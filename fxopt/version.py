"""The version of fxopt, defined only here."""

__version__ = "0.1.0"
