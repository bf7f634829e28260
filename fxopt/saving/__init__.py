"""Saves and loads a graph as data together with its weights, without pickle and without code."""

from fxopt.saving.folder import load, save

__all__ = ["load", "save"]
