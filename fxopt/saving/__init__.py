"""Saving and loading: a graph as data beside its weights, without pickle and without code."""

from fxopt.saving.folder import load, save

__all__ = ["load", "save"]
