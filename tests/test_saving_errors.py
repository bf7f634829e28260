"""A thing that cannot be saved or loaded is one clear error, and nothing of the old folder is lost."""

import copy
import hashlib
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import nn

import fxopt
from fxopt.saving import expressions, files
from fxopt.saving.allowed import Names
from tests import small_models
from tests.capture.test_modes import Custom

X = torch.randn(3, 4)


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.dense = nn.Linear(4, 4)

    def forward(self, x):
        y = self.dense(x)
        return torch.softmax(y.view(x.shape[0], 4), -1) * 2 + y.shape[0]


def small():
    rows = torch.export.Dim("rows", max=64)
    return fxopt.trace(Small().eval(), (X,), dynamic_shapes=({0: rows},))


@pytest.fixture
def folder(tmp_path):
    fxopt.save(small(), tmp_path / "saved")
    return tmp_path / "saved"


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def change(folder, edit):
    """Edit the graph as somebody would who can also compute digests."""
    document = json.loads((folder / "graph.json").read_text())
    document.pop("sha256")
    edit(document)
    (folder / "graph.json").write_text(json.dumps(document | {"sha256": files._seal(document)}))


def node(document, op):
    return next(node for node in document["modules"][0]["nodes"] if node["op"] == op)


def file_in(folder, pattern):
    (file,) = folder.glob(pattern)
    return file


FILES = ["graph.json", "model-*.safetensors"]


def flipped(data):
    return data[:-1] + bytes([data[-1] ^ 1])


DAMAGES = {
    **{
        f"cut to {part}": (lambda data, part=part: data[: int(len(data) * part)], FILES)
        for part in (0.0, 0.3, 0.99)
    },
    "a changed operator": (lambda data: data.replace(b"softmax", b"sigmoid"), FILES[:1]),
    "a changed weight": (flipped, FILES[1:]),
    **{
        text.decode(errors="replace")[:10]: (lambda data, text=text: text, FILES[:1])
        for text in (
            b"[]",
            b"{}",
            b"null",
            b'{"format": "1"}',
            b"[" * 100_000,
            b"\xef\xbb\xbf{}",
            b"\xff\xfe\x00",
        )
    },
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_file(name, folder):
    damage, patterns = DAMAGES[name]
    for pattern in patterns:
        file = file_in(folder, pattern)
        data = file.read_bytes()
        file.write_bytes(damage(data))
        what = "is cut off, or no file that fxopt saved|was changed since it was saved|is of format"
        with pytest.raises(fxopt.LoadError, match=rf"{file.name} ({what})"):
            fxopt.load(folder)
        file.write_bytes(data)


@pytest.mark.parametrize("pattern", FILES)
def test_a_missing_file(pattern, folder):
    file = file_in(folder, pattern)
    file.unlink()
    message = "is missing: give a folder that fxopt.save wrote"
    with pytest.raises(fxopt.LoadError, match=rf"{file.name} {message}"):
        fxopt.load(folder)
    with pytest.raises(fxopt.LoadError, match=rf"graph.json {message}"):
        fxopt.load(folder / "nowhere")


@pytest.mark.parametrize("number", [files.FORMAT + 1, files.FORMAT - 1, True, None])
def test_another_format(number, folder):
    def other(document):
        document["format"] = number
        document["versions"]["fxopt"] = "9.1"

    change(folder, other)
    message = rf"is of format {number}, written by .*9\.1.*; this fxopt reads format 3\. Use the version that wrote it"
    with pytest.raises(fxopt.LoadError, match=message):
        fxopt.load(folder)


FORBIDDEN = [
    "os.system",
    "posix.system",
    "builtins.eval",
    "builtins.exec",
    "builtins.__import__",
    "builtins.open",
    "subprocess.Popen",
    "torch.load",
    "torch.save",
    "torch.hub.load",
    "torch.from_file",
    "torch.ops.load_library",
    "torch.ops.aten.from_file",
    "torch.ops.aten.save",
    "torch.ops.__class__.__init__",
    "torch.ops.aten.__class__",
    "torch.ops.mylib.write",
    "torch.utils._os.system",
    "torch.serialization.os.system",
    "torch.Tensor.apply_",
    "torch.Tensor.__reduce_ex__",
    "torch.Tensor.__class__.__subclasses__",
    "torch.nn.functional.triplet_margin_with_distance_loss",
    "torch.nn.functional.torch.load",
    "torch.nn.modules.module.torch.load",
    "torch.nn.modules.linear.Linear",
    "torch.autocast",
    "operator.attrgetter",
    "operator.call",
    "operator.methodcaller",
    "functools.partial",
    "fxopt.capture.runtime.size_guards.SizeExpression",
    "fxopt.capture.runtime.size_guards.SizeGuard",
    "fxopt.passes.ready",
    "fxopt.passes.imported",
    "fxopt.packing.put_packed",
    "fxopt.kernels.packed_layer",
    "fxopt.passes.merging._split",
    "fxopt.passes.merging.functools.partial",
    "transformers.AutoModel.from_pretrained",
    "transformers.training_args.TrainingArguments",
    "transformers.utils.generic.os.system",
    "transformers.__class__",
    "apply:torch.nn.modules.linear.Linear",
    "apply:os.system",
    "",
    ".",
    "torch.",
    "torch.ops.",
    None,
    7,
    ["os.system"],
]


@pytest.mark.parametrize("name", FORBIDDEN, ids=str)
def test_a_forbidden_name(name, folder, monkeypatch):
    monkeypatch.setattr(os, "system", lambda command: pytest.fail("it ran a command"))
    change(
        folder,
        lambda document: node(document, "call_function").update(
            target={"name": name}, args={"tuple": ["true"]}, kwargs={"dict": []}
        ),
    )
    with pytest.raises(fxopt.LoadError) as caught:
        fxopt.load(folder)
    if isinstance(name, str):
        assert name.removeprefix("apply:") in str(caught.value)
        assert "graph.json cannot be loaded: TracedModule." in str(caught.value)
        assert "neither an operator of torch nor a layer or a class that only holds values" in str(
            caught.value
        )


def text_in(document, key):
    """The guard's condition on `rows`, or the shape of the input."""
    guard = next(m for m in document["modules"] if m["class"].endswith("InputGuard"))["attributes"]
    if key == "condition":
        return guard["alternatives"]["tuple"][0]["tuple"][0]["data"][1]
    return guard["inputs"]["tuple"][0]["data"][1]


CODE = "__import__('os').system('true')"


def layer(document):
    return next(m for m in document["modules"] if m["class"].endswith("Linear"))


def call(target, *args):
    """Replace the call of a function by another one."""
    return lambda d: node(d, "call_function").update(
        target={"name": target}, args={"tuple": [*args]}, kwargs={"dict": []}
    )


def method(**fields):
    return lambda d: node(d, "call_method").update(fields)


def argument(value):
    return method(args={"tuple": [{"node": "dense"}, value]})


def reads(target):
    return lambda d: node(d, "call_module").update(op="get_attr", target=target, args={"tuple": []})


def condition(text):
    return lambda d: text_in(d, "condition").update(condition=text)


def attributes(**values):
    return lambda d: layer(d)["attributes"].update(values)


def root(**values):
    return lambda d: d["modules"][0].update(values)


def weight(**facts):
    return lambda d: d["tensors"]["dense.weight"].update(facts)


STEP = {"data": ["Step", {"name": "", "signature": "", "transformation": {"bytes": [128]}}]}
BUILD = "fxopt.objects.build_object"
LINEAR = "torch.nn.modules.linear.Linear"
EDITS = {
    "condition": (condition(CODE), "more than arithmetic"),
    "shape": (
        lambda d: text_in(d, "shape").update(shape={"tuple": [f"{CODE} or 3", 4]}),
        "more than arithmetic",
    ),
    "text as a function": (lambda d: node(d, "call_function").update(target="torch.add"), "'torch.add'"),
    "method": (method(target="apply_"), "the method 'apply_'"),
    "method in code": (method(target=f'view"), {CODE}, ("'), "the method"),
    "dunder method": (method(target="__reduce_ex__"), "the method '__reduce_ex__'"),
    "name of a node": (method(name=f"x\n    {CODE}"), "the name of another node, or no name"),
    "name of an input": (lambda d: node(d, "placeholder").update(target=f"x={CODE}"), "code cannot have"),
    "keyword in code": (method(kwargs={"dict": [{"tuple": [f"x={CODE}, y", 1]}]}), "code cannot have"),
    "path": (lambda d: node(d, "call_module").update(target=f'dense"); {CODE}; ("'), "the path"),
    "path through a class": (
        lambda d: node(d, "call_module").update(target="dense.__class__"),
        "the path",
    ),
    "module that is not there": (
        lambda d: node(d, "call_module").update(target="dense.forward"),
        "'dense.forward', which is not there",
    ),
    "get_attr": (reads("dense.forward.__globals__"), "the path"),
    "layer as a value": (reads("dense"), "'dense', which is not there"),
    "the hooks of a module": (reads("dense._forward_hooks"), "'dense._forward_hooks', which is not there"),
    "a function in a list": (
        lambda d: d["modules"][0]["attributes"].update(stuff=[{"name": "builtins.getattr"}]),
        "builtins.getattr as a value",
    ),
    "a function in a dict in a tuple": (
        attributes(stuff={"tuple": [{"dict": [["a", {"name": "fxopt.objects.set_attributes"}]]}]}),
        "set_attributes as a value",
    ),
    "a function of a pass that gives a generator": (
        call("fxopt.passes.merging._groups", {"tuple": []}),
        "_groups, which is neither",
    ),
    "getattr": (call("builtins.getattr", {"node": "x"}, "__class__"), "the path '__class__'"),
    "getattr of a value": (call("builtins.getattr", {"node": "x"}, {"node": "x"}), "the path x"),
    "find": (call("fxopt.objects.find", "os.system"), "os.system, which is neither"),
    "build": (call(BUILD, "subprocess.Popen", {"dict": []}), "subprocess.Popen, which is neither"),
    "build by a value": (call(BUILD, {"node": "x"}, {"dict": []}), "x, which is neither"),
    "build a layer": (call(BUILD, LINEAR, {"dict": []}), "Linear, which is neither"),
    "find what makes attributes": (call("fxopt.objects.find", "builtins.getattr"), "getattr as a value"),
    "attribute that is called as a method": (
        call(BUILD, "transformers.cache_utils.DynamicCache", {"dict": [{"tuple": ["to", {"node": "x"}]}]}),
        "the attribute 'to', by which code would call a method",
    ),
    "key": (
        lambda d: node(d, "call_function").update(
            target={"name": "builtins.max"},
            args={"tuple": [[1, 2]]},
            kwargs={"dict": [{"tuple": ["key", "text"]}]},
        ),
        "max with keywords",
    ),
    "module as argument": (argument({"module": 0}), "a Small as an argument"),
    "guard as argument": (
        argument({"data": ["SizeGuard", {"condition": "s0 < 3", "source": ""}]}),
        "a SizeGuard as an argument",
    ),
    "function as argument": (argument({"name": "torch.add"}), "as an argument"),
    "class of layers as argument": (argument({"name": LINEAR}), "Linear as a value"),
    "call of an attribute of caches": (method(target="values"), "the method 'values'"),
    "getattr as a layer": (attributes(forward={"name": "builtins.getattr"}), "getattr as a value"),
    "function of a pass as a layer": (
        attributes(forward={"name": "fxopt.packing._unpacked"}),
        "fxopt.packing._unpacked, which is neither",
    ),
    "kind": (argument({"pickle": "gASVAAAA"}), "a value of the kind 'pickle'"),
    "no parts": (argument({"bytes": 10**12}), "a value of the kind 'bytes'"),
    "operation": (method(op="root"), "a node of the kind 'root'"),
    "name of a node in a set": (argument({"set": [{"node": CODE}]}), 'the name "__import__'),
    "twice": (
        lambda d: d["modules"][0]["nodes"].append(dict(d["modules"][0]["nodes"][0])),
        "the name of another node",
    ),
    "layer": (
        lambda d: layer(d).update({"class": "torch.nn.modules.module.torch.load"}),
        "torch.load, which is neither",
    ),
    "class of a layer": (
        lambda d: layer(d).update({"class": "torch.jit._script.ScriptModule"}),
        "ScriptModule, which is neither",
    ),
    "function as a layer": (lambda d: layer(d).update({"class": "torch.add"}), "no class of layers"),
    "record as a layer": (
        lambda d: layer(d).update({"class": "fxopt.rewriting.record.PassRecord"}),
        "no class of layers",
    ),
    "layer as the graph": (
        root(**{"class": LINEAR, "attributes": {"training": False}}),
        "which has no graph",
    ),
    "attribute": (attributes(forward={"name": "os.system"}), "os.system, which is neither"),
    "hook": (
        attributes(_forward_hooks={"dict": [{"tuple": [0, {"name": "torch.add"}]}]}),
        "a hook, or what torch.fx derives",
    ),
    "members among the attributes": (attributes(_modules={"dict": []}), "a hook, or what torch.fx derives"),
    "name of a child": (
        lambda d: d["modules"][0]["children"].update({"__class__": {"module": 1}}),
        "the path '__class__'",
    ),
    "child that is a function": (
        lambda d: d["modules"][0]["children"].update(dense={"name": "torch.add"}),
        "'dense' among the children",
    ),
    "parameter that is a text": (
        lambda d: layer(d)["parameters"].update(weight="weight"),
        "'weight' among the parameters",
    ),
    "derived": (lambda d: d["modules"][0]["attributes"].update(_code="x"), "derives from a graph"),
    "transformation of a step": (attributes(step=STEP), "a step of something else than a transformation"),
    "steps": (root(steps=[3]), "a step of something else than a pass"),
    "configuration": (attributes(config={"config": ["os.system", {"dict": []}]}), "not in `trusted`"),
    "strides": (weight(stride=[400, 1]), "out of bounds"),
    "dtype": (weight(dtype="torch.float64"), "dense.weight is torch.float32, not torch.float64"),
    "device": (weight(device="nowhere:0"), "'nowhere:0', which is not available here"),
    "class name": (root(name=CODE), 'the name "__import__'),
}


@pytest.mark.parametrize(("edit", "reason"), EDITS.values(), ids=EDITS)
def test_a_forged_graph(edit, reason, folder, monkeypatch):
    monkeypatch.setattr(os, "system", lambda command: pytest.fail("it ran a command"))
    change(folder, edit)
    with pytest.raises(fxopt.LoadError, match=r"saved.(graph.json|model-\w*.safetensors)") as caught:
        fxopt.load(folder)
    assert reason in str(caught.value)


def test_a_configuration_is_data_unless_its_class_is_trusted(folder, monkeypatch):
    """`from_dict` of a configuration may ask the hub for a name that the folder gives, as that of Detr for a backbone."""
    from transformers import DetrConfig

    def asked(*args, **kwargs):
        raise AssertionError("it asks the hub")

    monkeypatch.setattr(DetrConfig, "from_dict", asked)
    saved = {"config": [f"{DetrConfig.__module__}.DetrConfig", {"dict": [["backbone", "someone/repo"]]}]}
    change(folder, lambda d: d["modules"][0].update(config=saved))
    loaded = fxopt.load(folder)
    assert loaded.config == {"backbone": "someone/repo"}
    assert loaded(X).shape == (3, 4)
    with pytest.raises(fxopt.LoadError, match=r"AssertionError: it asks the hub"):
        fxopt.load(folder, trusted=[DetrConfig])
    change(folder, lambda d: layer(d)["attributes"].update(config=saved))
    with pytest.raises(fxopt.LoadError, match=r"DetrConfig, which is not in `trusted`"):
        fxopt.load(folder)


NOT_IMPORTED = """
import sys, transformers
from fxopt.saving.allowed import Names, Refused
Names().find("torch.add")  # fills the tables
before = set(sys.modules)
for name in (
    "transformers.trainer.Trainer",
    "transformers.pipelines.text_generation.ReturnType",
    "torch.nn.modules.linear.json.tool.main",
    "fxopt.optimizing.unknown.Layer",
    "fxopt.passes.unknown.Pass",
):
    try:
        Names().find(name)
    except Refused:
        print(name, set(sys.modules) - before)
"""


def test_a_refused_name_imports_nothing():
    done = subprocess.run([sys.executable, "-c", NOT_IMPORTED], capture_output=True, text=True, check=True)
    assert [line.partition(" ")[2] for line in done.stdout.splitlines()] == ["set()"] * 5


def test_a_forged_record(tmp_path, monkeypatch):
    """The steps of an undo are held against the same rules as what the graph does."""
    monkeypatch.setattr(os, "system", lambda command: pytest.fail("it ran a command"))
    model, inputs = small_models.bert()
    fxopt.save(fxopt.MergeLinears()(fxopt.symbolic_trace(model.eval(), list(inputs))), tmp_path / "saved")
    text = (tmp_path / "saved" / "graph.json").read_text()

    def edits(document):
        return [edit["data"] for edit in document["modules"][0]["steps"][0]["data"][1]["edits"]["tuple"]]

    def swap(document):
        return next(data for data in edits(document) if data[0] == "Swapped")

    def before(document):
        states = [data[1]["before"] for data in edits(document) if data[0] == "NodeEdit"]
        return next(state["data"][1] for state in states if state)

    arguments = [{"tuple": []}, {"dict": []}]
    forged = {
        "os.system, which": lambda d: swap(d).__setitem__(2, ["os.system", *arguments]),
        "torch.add, which": lambda d: swap(d).__setitem__(2, ["torch.add", *arguments]),
        "fxopt.passes.ready, which": lambda d: swap(d).__setitem__(2, ["fxopt.passes.ready", *arguments]),
        "fxopt.capture.trace, which": lambda d: swap(d).__setitem__(2, ["fxopt.capture.trace", *arguments]),
        "by which nothing is undone": lambda d: (
            swap(d)[1].update(restore={"name": "torch.Tensor.backward"}),
            swap(d).pop(),
        ),
        "os.system": lambda d: before(d).update(op="call_function", target={"name": "os.system"}),
        "the method": lambda d: before(d).update(op="call_method", target=CODE),
        "as an argument": lambda d: before(d).update(args={"tuple": [{"module": 0}]}),
        "the path": lambda d: swap(d)[1].update(left={"dict": [{"tuple": ["__class__", None]}]}),
    }
    for reason, edit in forged.items():
        (tmp_path / "saved" / "graph.json").write_text(text)
        change(tmp_path / "saved", edit)
        with pytest.raises(fxopt.LoadError, match=rf"graph.json.*{reason}"):
            fxopt.load(tmp_path / "saved")


def test_random_changes_are_a_load_error_or_a_graph(folder):
    document = json.loads((folder / "graph.json").read_text())
    document.pop("sha256")
    chance = random.Random(0)
    values = [
        None,
        True,
        -1,
        10**30,
        1.5,
        "",
        "x",
        "__class__",
        [],
        {},
        {"tuple": 3},
        {"node": "x"},
        {"module": 0},
    ]
    refused = 0
    for _ in range(400):
        changed = copy.deepcopy(document)
        place = changed
        while True:
            keys = list(place) if isinstance(place, dict) else list(range(len(place)))
            if not keys:
                break
            key = chance.choice(keys)
            if not isinstance(place[key], dict | list) or not place[key] or chance.random() < 0.1:
                if chance.random() < 0.2:
                    del place[key]
                else:
                    place[key] = chance.choice(values)
                break
            place = place[key]
        (folder / "graph.json").write_text(json.dumps(changed | {"sha256": files._seal(changed)}))
        try:
            fxopt.load(folder)
        except fxopt.LoadError:
            refused += 1
    assert refused > 100


def test_conditions_are_arithmetic():
    for text in ("s0 <= 64", "(s0*s1) % 8 == 0", "max(s0, 2) // 3 < 5 and not s0 == 1"):
        assert expressions.is_arithmetic(text)
    for text in (
        None,
        3,
        "",
        "x = 1",
        "f'{s0}'",
        "s0.real",
        "s0[0]",
        "'a' * s0",
        "(s0 := 3)",
        "(lambda: s0)()",
        "[s0 for s in (1,)]",
        "max(s0, key=print)",
        "torch.load('x')",
        "math.__dict__",
        "print(s0)",
    ):
        assert not expressions.is_arithmetic(text), text


def test_every_name_finds_what_it_names():
    names = Names()
    for function in (
        torch.add,
        torch.nn.functional.gelu,
        torch.Tensor.add_,
        torch.ops.aten.add.Tensor,
        getattr,
    ):
        assert names.find(names.of(function)) is function


def refused_modules():
    hooked, held, meta, sparse, parametrized = small(), small(), small(), small(), small()
    hooked.dense.register_forward_hook(lambda *args: None)
    held.dense.settings = object()
    meta.dense.weight = nn.Parameter(torch.empty(4, 4, device="meta"))
    sparse.register_buffer("mask", torch.eye(3).to_sparse())
    nn.utils.parametrizations.weight_norm(parametrized.dense)
    named = small()
    named.register_buffer("two words", torch.ones(2))
    named.graph.output_node().prepend(named.graph.get_attr("two words"))
    function = small()
    next(n for n in function.graph.nodes if n.op == "call_function").target = Small
    method = small()
    next(n for n in method.graph.nodes if n.op == "call_method").target = "register_hook"
    return {
        "hook": (hooked, r"dense: has hooks \(_forward_hooks\)"),
        "object": (held, r"dense.settings: a builtins.object, which is no data"),
        "meta": (
            meta,
            r"dense.weight: a torch.nn.parameter.Parameter of .*, on meta, which is no plain memory",
        ),
        "sparse": (sparse, r"mask: a torch.Tensor of torch.float32, torch.sparse_coo, .*no plain memory"),
        "parametrized": (parametrized, r"dense: is parametrized, which makes it a class of its own"),
        "function": (
            function,
            r"softmax \(from .*test_saving_errors.py:\d+\): tests.test_saving_errors.Small, which is neither",
        ),
        "method": (method, r"size \(from .*\): the method 'register_hook'"),
        "autograd": (
            fxopt.trace(Custom(), (X,)),
            r"tests.capture.test_modes.Cube, which is neither .*give it in `trusted`",
        ),
        "name": (named, r"the path 'two words', .* Rename the module, tensor or attribute"),
        "no graph": (Small(), r"a Small is no graph module: capture it first"),
        "no module": (None, r"a NoneType is no graph module: capture it first"),
        "exported": (
            torch.export.export(Small(), (X,)).module(),
            r"_StatefulGraphModule, which is neither|other code, as where torch.export",
        ),
    }


def test_what_cannot_be_saved_leaves_the_folder_as_it_was(folder):
    before = contents(folder)
    for gm, message in refused_modules().values():
        with pytest.raises(fxopt.SaveError, match=message):
            fxopt.save(gm, folder)
        assert contents(folder) == before
        assert os.listdir(folder.parent) == ["saved"]
    assert torch.isfinite(fxopt.load(folder)(X)).all()


@pytest.mark.parametrize("place", ["save_file", "write_text", "fsync", "first replace", "second replace"])
@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_save_that_fails_leaves_the_folder_as_it_was(place, error, folder, monkeypatch):
    before, replace, calls = contents(folder), os.replace, []

    def fails(*args, **kwargs):
        calls.append(args)
        if place == "second replace" and len(calls) != 2:
            return replace(*args)
        raise error

    target = {"save_file": (files, "save_file"), "write_text": (Path, "write_text"), "fsync": (os, "fsync")}
    monkeypatch.setattr(*target.get(place, (os, "replace")), fails)
    expected = fxopt.SaveError if isinstance(error, OSError) else KeyboardInterrupt
    with pytest.raises(expected) as caught:
        fxopt.save(fxopt.trace(nn.ReLU(), (X,)), folder)
    if expected is fxopt.SaveError:
        assert "saved could not be written, and is as it was: [Errno 28] No space left" in str(caught.value)
    assert calls
    monkeypatch.undo()
    assert contents(folder) == before
    assert os.listdir(folder.parent) == ["saved"]
    assert fxopt.load(folder)(X).shape == (3, 4)


def test_other_files_of_a_folder_stay(folder, monkeypatch):
    others = {"notes.txt": b"mine", "model-00001-of-00002.safetensors": b"of somebody else"}
    for name, data in others.items():
        (folder / name).write_bytes(data)
    monkeypatch.chdir(folder)
    fxopt.save(small(), ".")
    assert others.items() <= contents(folder).items()
    assert len(contents(folder)) == 4
    assert fxopt.load(Path())(X).shape == (3, 4)


def test_a_file_is_no_folder(tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(fxopt.SaveError, match=r"file could not be written"):
        fxopt.save(small(), tmp_path / "file")
    assert (tmp_path / "file").read_text() == "mine"


def test_a_graph_of_somebody_else_is_replaced_and_names_no_file_to_remove(folder):
    outside = folder.parent / "model-.safetensors"
    outside.write_text("mine")
    for text in ('{"weights": "/../../"}', "[1]"):
        (folder / "graph.json").write_text(text)
        fxopt.save(small(), folder)
        assert fxopt.load(folder)(X).shape == (3, 4)
    change(folder, lambda d: d.update(weights="../../model-"))
    fxopt.save(small(), folder)
    assert outside.read_text() == "mine"


def with_weights(folder, data):
    """Put other weights in the folder, as somebody would who can also compute digests."""
    digest = hashlib.sha256(data).hexdigest()
    files.weights_file(folder, digest).write_bytes(data)
    change(folder, lambda d: d.update(weights=digest))


def test_weights_that_are_no_safetensors(folder):
    with_weights(folder, b"\xff" * 64)
    with pytest.raises(fxopt.LoadError, match=r"safetensors is cut off, or no file that fxopt saved"):
        fxopt.load(folder)
    with_weights(folder, safetensors.torch.save({}))
    with pytest.raises(fxopt.LoadError, match=r"KeyError"):
        fxopt.load(folder)


@pytest.mark.parametrize("at", FILES)
def test_a_folder_that_is_saved_anew_while_it_is_read_is_read_whole(at, tmp_path, monkeypatch):
    first, second = (fxopt.trace(nn.Linear(2, 2), (torch.ones(1, 2),)) for _ in range(2))
    fxopt.save(first, tmp_path / "saved")
    read, saves = files._explained, [second]

    def explained(path):
        if path.match(at) and saves:  # another process, just before this one reads the file
            fxopt.save(saves.pop(), tmp_path / "saved")
        return read(path)

    monkeypatch.setattr(files, "_explained", explained)
    loaded = fxopt.load(tmp_path / "saved")
    assert not saves
    assert all(map(torch.equal, loaded.parameters(), second.parameters()))


@pytest.mark.parametrize("at", FILES)
def test_a_save_that_another_one_overtakes(at, folder, monkeypatch):
    replace, others = os.replace, [small(), small()]

    def overtaken(source, target):
        if Path(target).match(at) and others:  # another process, just before this one renames the file
            fxopt.save(others.pop(), folder)
        replace(source, target)

    monkeypatch.setattr(os, "replace", overtaken)
    last = small()
    fxopt.save(last, folder)
    assert not others
    assert torch.equal(fxopt.load(folder).dense.weight, last.dense.weight)


def test_a_device_that_is_not_there_is_named(folder):
    change(folder, lambda d: d["tensors"]["dense.weight"].update(device="cuda:99"))
    with pytest.raises(
        fxopt.LoadError,
        match=r"dense.weight cannot be moved to 'cuda:99', which is not available here.* device=\"cpu\"",
    ):
        fxopt.load(folder)
    assert fxopt.load(folder, device="cpu")(X).shape == (3, 4)


def test_the_type_of_a_node_is_one_of_few(folder, monkeypatch):
    monkeypatch.setattr(os, "system", lambda command: pytest.fail("it ran a command"))
    change(folder, lambda d: node(d, "placeholder").update(type=CODE))
    assert CODE not in fxopt.load(folder).code


class Raises(nn.Linear):
    def __setstate__(self, state):
        raise KeyError("no state")


def test_what_a_layer_raises_when_it_is_made_again_is_an_error_of_saving(tmp_path):
    graph = torch.fx.Graph()
    graph.output(graph.call_module("0", (graph.placeholder("x"),)))
    gm = torch.fx.GraphModule(nn.Sequential(Raises(4, 2)), graph)
    with pytest.raises(fxopt.SaveError, match=r"cannot be saved: KeyError: 'no state'"):
        fxopt.save(gm, tmp_path / "saved", trusted=[Raises])
    assert not (tmp_path / "saved").exists()
