"""Equivalence: a pipeline that preserves the computation leaves the outputs as they are."""

from __future__ import annotations

import torch

from validation.comparison import judge_graph
from validation.records import Finding, Outcome
from validation.subject import Subject


def check(subject: Subject, pipeline: tuple[str, ...]) -> Finding:
    """Compare the model, run eagerly, with its rewritten graph, in float64 and in each dtype of the entry."""
    if not sum(subject.rewritten(pipeline, torch.float64).sites):
        return Finding(Outcome.NO_OP, "nothing to rewrite")
    return judge_graph(subject, lambda dtype: subject.rewritten(pipeline, dtype).module)
