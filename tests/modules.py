"""Modules made of a forward and what it uses."""

from torch import nn


def module(forward, **attributes):
    """A module in eval mode with this forward; modules among the attributes become children."""
    made = type("Made", (nn.Module,), {"forward": forward})()
    for name, value in attributes.items():
        setattr(made, name, value)
    return made.eval()
