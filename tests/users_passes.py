"""Transformations as users write them, and what happens to a graph module between applying and undoing."""

import io
import operator
import pickle

import torch

from fxopt import ReversibleTransformation, history


class MulToSub(ReversibleTransformation):
    """Marks nothing."""

    before, after = operator.mul, operator.sub

    def transform(self, graph_module):
        return self.change(graph_module, self.before, self.after)

    def reverse(self, graph_module):
        return self.change(graph_module, self.after, self.before)

    def change(self, graph_module, old, new):
        for node in graph_module.graph.find_nodes(op="call_function", target=old):
            node.target = new
        return graph_module


class Negates(ReversibleTransformation):
    """Each application adds a node, and `reverse` takes all of them away."""

    def transform(self, graph_module):
        output = next(iter(graph_module.graph.find_nodes(op="output")))
        (value,) = output.all_input_nodes
        with graph_module.graph.inserting_before(output):
            node = graph_module.graph.call_function(operator.neg, (value,))
        output.replace_input_with(value, node)
        self.mark_as_transformed(node)
        return graph_module

    def reverse(self, graph_module):
        for node in reversed(self.get_transformed_nodes(graph_module)):
            node.replace_all_uses_with(node.args[0])
            graph_module.graph.erase_node(node)
        return graph_module


def names(graph_module):
    return [step.name for step in history(graph_module)]


def pickled(graph_module):
    return pickle.loads(pickle.dumps(graph_module))


def saved(graph_module):
    file = io.BytesIO()
    torch.save(graph_module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)
