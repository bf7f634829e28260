"""The tests as cases for the validation of sites: each pass that a test calls is verified, and only that is heard."""

from __future__ import annotations

import contextlib
import importlib
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import pytest
from torch.fx import GraphModule, Node
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

from fxopt.rewriting.edits import Edit
from fxopt.rewriting.rewrite import Rewrite
from fxopt.rewriting.verification import Verifier

Said = dict[str, str]
"""The first finding of the validation of sites in each test, by the test's id."""


def _with_metadata(traced: GraphModule, inputs: Sequence[Any]) -> None:
    with contextlib.suppress(Exception):  # as the graph raises, so does the test
        FakeTensorProp(traced).propagate(*inputs)


class Listener:
    """A plugin of pytest that verifies every pass that keeps outputs, and leaves the sites as they are.

    Args:
        known: tests in which there is something to say without a fault: the run ends with the first that is none of
            these. None for all tests, to the last.
    """

    def __init__(self, known: Collection[str] | None) -> None:
        self.said: Said = {}
        self._known, self._test = known, ""
        importlib.import_module("tests.before_after").known.append(_with_metadata)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """Verify the passes that one test calls."""
        self._test = item.nodeid
        with self._listening():
            result = yield
        if self._known is not None and self.said.keys() - set(self._known):
            item.session.shouldstop = "the validation of sites has found something"
        return result

    @contextlib.contextmanager
    def _listening(self) -> Iterator[None]:
        made, asked, explained = Verifier.__init__, Verifier.difference, Rewrite.explain

        def init(verifier: Verifier, graph_module: GraphModule, verify: Any, preserves: bool) -> None:
            made(verifier, graph_module, verify, preserves)
            if preserves and verify is False:
                verifier.net = Verifier.__new__(Verifier)  # type: ignore[attr-defined]
                made(verifier.net, graph_module, True, True)  # type: ignore[attr-defined]

        def difference(verifier: Verifier, edits: Sequence[Edit], new: Mapping[str, Node]) -> str | None:
            net = getattr(verifier, "net", None)
            reason = asked(net or verifier, edits, new)
            if reason:
                self.said.setdefault(self._test, reason)
            return None if net else reason

        def explain(pass_: Rewrite[Any], graph_module: GraphModule, verify: Any = False) -> Any:
            # Tests of refusals call no pass. The fault may make this rewrite of a copy raise; only what is said counts.
            if verify is False and pass_.preserves_computation:
                with contextlib.suppress(Exception), warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    explained(pass_, graph_module, True)
            return explained(pass_, graph_module, verify)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Rewrite, "explain", explain)
            patch.setattr(Verifier, "__init__", init)
            patch.setattr(Verifier, "difference", difference)
            yield
