"""Every example in the documentation and in the docstrings runs."""

import doctest
import importlib
import pkgutil
import re
from pathlib import Path

import pytest
import torch
from transformers import BertModel

import fxopt
from tests.capture.test_transformers import bert, groupvit, resnet

ROOT = Path(__file__).parent.parent
PAGES = sorted(str(page.relative_to(ROOT)) for page in (*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")))
FIRST = ("README.md", "CONTRIBUTING.md", "docs/start.md", "docs/guide.md")
"""The pages whose examples run in the short run."""
OPTIONAL = ("diffusers", "peft", "sentence_transformers")
"""Libraries that the tests do not install, but `make docs-users` does."""
CODE = re.compile(r"^ *```python\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
MODULES = ["fxopt", *(m.name for m in pkgutil.walk_packages(fxopt.__path__, "fxopt."))]
HARNESS = [
    ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    for file in sorted((ROOT / "validation").rglob("*.py"))
    if ">>> " in file.read_text()
]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Small checkpoints with random weights, in folders that have the names of the published models."""
    folder = tmp_path_factory.mktemp("checkpoints")
    for name, model in {
        "bert-base-uncased": bert(cls=BertModel),
        "microsoft/resnet-50": resnet(),
        "nvidia/groupvit-gcc-yfcc": groupvit(),
    }.items():
        model.save_pretrained(folder / name)
    return folder


@pytest.fixture
def checkpoints(saved, tmp_path, monkeypatch):
    """A folder of its own, where the checkpoints are found by the names of the published models."""
    for name in saved.iterdir():
        (tmp_path / name.name).symlink_to(name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=() if page in FIRST else pytest.mark.long)
        for page in PAGES
        if CODE.search((ROOT / page).read_text())
    ],
)
def test_documentation(page, checkpoints):
    torch.manual_seed(0)
    text = (ROOT / page).read_text()
    assert all(code.lstrip().startswith(">>> ") for code in CODE.findall(text)), "Python that does not run"
    for library in OPTIONAL:
        if f">>> from {library} import " in text:
            pytest.importorskip(library)
    # A blank line ends an expected output; in Markdown it is the fence that does.
    text = re.sub(r"^ *```.*$", "", text, flags=re.MULTILINE)
    examples = doctest.DocTestParser().get_doctest(text, {}, page, page, 0)
    failed, attempted = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(examples)
    assert attempted > 0
    assert failed == 0


@pytest.mark.sweep(3)
@pytest.mark.parametrize("name", [*MODULES, *HARNESS])
def test_docstrings(name, checkpoints):
    torch.manual_seed(0)
    failed, _ = doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS)
    assert failed == 0


def test_every_public_name_has_an_example():
    without = []
    for name in fxopt.__all__:
        value = getattr(fxopt, name)
        if isinstance(value, type) and issubclass(value, Exception):
            continue  # the tests of what raises them show these
        if ">>>" not in (value.__doc__ or ""):
            without.append(name)
    assert without == []
