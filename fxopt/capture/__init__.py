"""Capture: a model's forward as a graph whose `torch.nn` layers are still modules."""

from fxopt.capture.inputs import symbolic_trace
from fxopt.capture.module import TracedModule
from fxopt.capture.trace import trace

__all__ = ["TracedModule", "symbolic_trace", "trace"]
