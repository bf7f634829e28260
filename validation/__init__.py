"""The harness: proves and measures fxopt over a zoo of models."""

from .torchvision_operators import define_missing_operators

define_missing_operators()  # before anything imports transformers, which imports torchvision where it is installed
