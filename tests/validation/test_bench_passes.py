"""The benchmark of passes: every pass is timed on graphs that it really rewrites."""

import pytest
from typer.testing import CliRunner

from fxopt import history
from fxopt.passes import available
from validation.bench.__main__ import app
from validation.bench.passes import kind_for

pytestmark = pytest.mark.long

WIDE = {"COLUMNS": "300", "TERMINAL_WIDTH": "300"}


@pytest.mark.parametrize("name", ["MergeLinears", "FuseBatchNorm2dInConv2d"])
def test_a_pass_has_work_in_each_layer(name):
    pass_ = available()[name]()
    kind = kind_for(pass_)
    (few,), (many,) = (history(pass_(kind(layers))) for layers in (2, 4))
    assert many.sites > few.sites > 0


def test_the_table_has_a_row_for_each_pass():
    result = CliRunner().invoke(app, ["passes", "--layers", "1,2", "--rounds", "1"], env=WIDE)
    assert result.exit_code == 0, result.output
    assert sum(f"{name} apply" in result.output for name in available()) > 10
