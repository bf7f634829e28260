"""Capture: a model's forward as a graph whose `torch.nn` layers are still modules."""

from fxopt.capture.runtime.traced_module import TracedModule
from fxopt.capture.symbolic_trace import symbolic_trace
from fxopt.capture.trace import trace, trace_method

__all__ = ["TracedModule", "symbolic_trace", "trace", "trace_method"]
