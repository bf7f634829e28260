"""A pass restricted to some of its sites."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from torch.fx import GraphModule, Node

from fxopt.rewriting.explanation import Refusal, node_of
from fxopt.rewriting.rewrite import ReversibleRewrite, Rewrite
from fxopt.rewriting.rewriter import Rewriter


@dataclasses.dataclass(frozen=True)
class AtSites(ReversibleRewrite[Any]):
    """Another pass, restricted to the sites of certain nodes.

    Attributes:
        rewrite: the pass.
        nodes: the names of the nodes of the chosen sites, as `explain` lists them.

    Example:
        >>> import torch
        >>> from fxopt import FuseBiasInLinear
        >>> layers = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 2))
        >>> AtSites(FuseBiasInLinear(), ("_1",)).explain(torch.fx.symbolic_trace(layers))
        AtSites: 1 sites, 0 refused
          _1  1  site
    """

    rewrite: Rewrite[Any]
    nodes: tuple[str, ...]

    @property
    def preserves_computation(self) -> bool:  # type: ignore[override]
        """The flag `preserves_computation` of the pass."""
        return self.rewrite.preserves_computation

    @property
    def reversible(self) -> bool:  # type: ignore[override]
        """The flag `reversible` of the pass."""
        return self.rewrite.reversible

    def match(self, graph_module: GraphModule) -> Iterator[Any]:
        """Yield the chosen sites of the pass, and all its refusals."""
        for found in self.rewrite.match(graph_module):
            if isinstance(found, Refusal) or node_of(found).name in self.nodes:
                yield found

    def apply(self, rewriter: Rewriter, site: Any) -> Any:
        """Rewrite a site by `apply` of the pass."""
        return self.rewrite.apply(rewriter, site)

    def opens_sites(self, graph_module: GraphModule, sites: Sequence[Node]) -> bool:
        """Tell whether the pass opens new sites."""
        return self.rewrite.opens_sites(graph_module, sites)
