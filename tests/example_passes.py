"""The passes of the guide, a model that they change, and a pass that leaves an invalid graph."""

import operator

import torch
from torch import nn

from fxopt import ReversibleTransformation, Transformation


class Product(nn.Module):
    def forward(self, x, y):
        return x * y


class ChangeMulToAdd(Transformation):
    """The first example of the guide."""

    def transform(self, graph_module):
        for node in graph_module.graph.nodes:
            if node.op == "call_function" and node.target == operator.mul:
                node.target = operator.add
                self.mark_as_transformed(node)
        return graph_module


class MulToMulTimesTwo(ReversibleTransformation):
    """The second example of the guide, with nodes where it computes with a Node as if it were a number."""

    def transform(self, graph_module):
        for node in list(graph_module.graph.nodes):
            if node.op == "call_function" and node.target == operator.mul and not self.transformed(node):
                x, y = node.args
                with graph_module.graph.inserting_before(node):
                    doubled = graph_module.graph.call_function(operator.mul, (2, x))
                self.mark_as_transformed(doubled)
                node.args = (doubled, y)
        return graph_module

    def reverse(self, graph_module):
        for node in self.get_transformed_nodes(graph_module):
            node.replace_all_uses_with(node.args[1])
            graph_module.graph.erase_node(node)
        return graph_module


class BreaksTheGraph(Transformation):
    def transform(self, graph_module):
        nodes = list(graph_module.graph.nodes)
        nodes[-2].append(nodes[0])  # a placeholder behind its use
        return graph_module


def product():
    return torch.fx.symbolic_trace(Product())


TWO, THREE = torch.tensor(2.0), torch.tensor(3.0)
