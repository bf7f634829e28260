"""Expectations of a model's cases: failures that are known, and errors that are tolerated."""

from __future__ import annotations

import dataclasses
import datetime
import fnmatch
from collections.abc import Collection
from typing import Annotated

import pydantic
from pydantic import Field, PositiveFloat

from .records import FAILING, Case, Check, Outcome, Record

Reason = Annotated[str, Field(min_length=1)]


class KnownFailure(pydantic.BaseModel, extra="forbid", frozen=True):
    """Cases that fail, and why that is accepted. Passing them is a failure too: the entry is out of date.

    `pipeline` is the names of passes joined by "+", or a named pipeline, or a pattern of these such as `*Fuse*`; it is
    empty before any pass. `outcome` is the failure that is accepted: `fail` or `error` where it is not given, which
    excuses no hang and no crash. `stage` is where it fails, and `message` a part of what it says. From `expires`
    on, the failure is one again.
    """

    check: Check
    pipeline: str = ""
    device: str | None = None
    outcome: Outcome | None = None
    stage: str | None = None
    message: str | None = None
    expires: datetime.date | None = None
    reason: Reason

    def covers(self, case: Case) -> bool:
        """True if `case` is one of those that fail."""
        same = self.check == case.check and self.device in (None, case.device)
        return same and fnmatch.fnmatchcase("+".join(case.pipeline), self.pipeline)

    def objection(self, outcome: Outcome, stage: str, message: str) -> str:
        """Why this does not accept how a case ended; empty where it does."""
        accepted = [self.outcome] if self.outcome else [Outcome.FAIL, Outcome.ERROR]
        if self.expires and datetime.date.today() >= self.expires:
            return f"expired on {self.expires}"
        if outcome not in accepted:
            return f"not for {outcome}"
        if self.stage not in (None, stage):
            return f"for stage {self.stage}"
        return "" if self.message is None or self.message in message else f"for {self.message!r}"


def judged(failures: Collection[KnownFailure], record: Record) -> Record:
    """A record in the light of the failures that are known of its model."""
    known = [failure for failure in failures if failure.covers(record.case)]
    if not known or record.outcome is Outcome.SKIP:
        return record
    if record.outcome not in FAILING:
        text = f"model_zoo.yaml expects a failure ({known[0].reason}), but there was none: take it out of known_failures"
        return dataclasses.replace(record, outcome=Outcome.FAIL, reason=text)
    objections = [failure.objection(record.outcome, record.stage, record.reason) for failure in known]
    if "" in objections:
        text = f"{known[objections.index('')].reason} ({record.outcome}: {record.reason})"
        return dataclasses.replace(record, outcome=Outcome.EXPECTED, reason=text)
    text = f"{record.reason} (the known failure of model_zoo.yaml is {'; '.join(objections)})"
    return dataclasses.replace(record, reason=text)


class Tolerance(pydantic.BaseModel, extra="forbid", frozen=True):
    """An error that a pipeline may make in a model although it is too large for a right rewrite: how large, why, and
    on which day it expires; from then on it counts again.

    `relative_error` is relative to the largest value of a tensor; `pipeline` is written as in `KnownFailure`.
    """

    pipeline: str
    relative_error: PositiveFloat
    reason: Reason
    expires: datetime.date
