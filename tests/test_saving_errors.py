"""A thing that cannot be saved or loaded is one clear error, and nothing of the old folder is lost."""

import copy
import json
import os
import random
import shutil
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
    return next(node for node in document["nodes"] if node["op"] == op)


@pytest.mark.parametrize("name", ["graph.json", "model.safetensors"])
def test_a_missing_file(name, folder):
    (folder / name).unlink()
    with pytest.raises(fxopt.LoadError, match=rf"{name} is missing: give a folder that fxopt.save wrote"):
        fxopt.load(folder)
    with pytest.raises(fxopt.LoadError, match=r"graph.json is missing"):
        fxopt.load(folder / "nowhere")


@pytest.mark.parametrize("name", ["graph.json", "model.safetensors"])
@pytest.mark.parametrize("part", [0.0, 0.3, 0.99])
def test_a_truncated_file(name, part, folder):
    data = (folder / name).read_bytes()
    (folder / name).write_bytes(data[: int(len(data) * part)])
    with pytest.raises(fxopt.LoadError, match=rf"{name} (is|has \d+ bytes, not \d+: it is) cut off"):
        fxopt.load(folder)


def test_a_changed_file(folder):
    text = (folder / "graph.json").read_text()
    (folder / "graph.json").write_text(text.replace("softmax", "sigmoid"))
    with pytest.raises(fxopt.LoadError, match=r"graph.json was changed since it was saved"):
        fxopt.load(folder)
    (folder / "graph.json").write_text(text)
    weights = bytearray((folder / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (folder / "model.safetensors").write_bytes(weights)
    with pytest.raises(fxopt.LoadError, match=r"model.safetensors was changed since it was saved"):
        fxopt.load(folder)


@pytest.mark.parametrize(
    "text", ["[]", "{}", "null", '{"format": "1"}', '{"format": 0}', "[" * 100_000, "\ufeff{}"]
)
def test_a_file_of_somebody_else(text, folder):
    (folder / "graph.json").write_text(text)
    with pytest.raises(fxopt.LoadError, match=r"graph.json"):
        fxopt.load(folder)
    (folder / "graph.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(fxopt.LoadError, match=r"graph.json is cut off, or no graph that fxopt saved"):
        fxopt.load(folder)


def test_a_newer_format(folder):
    def newer(document):
        document["format"] = files.FORMAT + 1
        document["versions"]["fxopt"] = "9.1"

    change(folder, newer)
    with pytest.raises(
        fxopt.LoadError, match=r"format 3, written by fxopt 9.1; this fxopt reads up to 2. Update fxopt"
    ):
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
        folder, lambda document: node(document, "call_function").update(target=name, args=["true"], kwargs={})
    )
    with pytest.raises(fxopt.LoadError) as caught:
        fxopt.load(folder)
    if isinstance(name, str):
        assert name.removeprefix("apply:") in str(caught.value)
        assert "graph.json names" in str(caught.value)


def test_a_name_is_refused_by_name(folder):
    change(folder, lambda document: node(document, "call_function").update(target="os.system"))
    message = r"names os.system, which fxopt does not load: neither an operator of torch nor a class that only holds values"
    with pytest.raises(fxopt.LoadError, match=message):
        fxopt.load(folder)


def text_in(document, key):
    """The guard's condition on `rows`, or the shape of the input."""
    guard = next(m for m in document["modules"] if m["class"].endswith("InputGuard"))["attributes"]
    if key == "condition":
        return guard["alternatives"]["tuple"][0]["tuple"][0]["data"][1]
    return guard["inputs"]["tuple"][0]["data"][1]


CODE = "__import__('os').system('true')"


def layer(document):
    return next(m for m in document["modules"] if m["class"].endswith("Linear"))


EDITS = {
    "condition": lambda d: text_in(d, "condition").update(condition=CODE),
    "shape": lambda d: text_in(d, "shape").update(shape={"tuple": [f"{CODE} or 3", 4]}),
    "lambda": lambda d: text_in(d, "condition").update(condition=f"(lambda: {CODE})()"),
    "comprehension": lambda d: text_in(d, "condition").update(condition=f"[{CODE} for s in (1,)]"),
    "keyword": lambda d: text_in(d, "condition").update(condition="max(s0, key=print)"),
    "torch in a condition": lambda d: text_in(d, "condition").update(condition="torch.load('x')"),
    "method": lambda d: node(d, "call_method").update(target="apply_"),
    "method in code": lambda d: node(d, "call_method").update(target=f'view"), {CODE}, ("'),
    "dunder method": lambda d: node(d, "call_method").update(target="__reduce_ex__"),
    "name of a node": lambda d: node(d, "call_method").update(name=f"x\n    {CODE}"),
    "name of an input": lambda d: node(d, "placeholder").update(target=f"x={CODE}"),
    "keyword in code": lambda d: node(d, "call_method").update(kwargs={f"x={CODE}, y": 1}),
    "path": lambda d: node(d, "call_module").update(target=f'dense"); {CODE}; ("'),
    "path through a class": lambda d: node(d, "call_module").update(target="dense.__class__"),
    "get_attr": lambda d: node(d, "call_module").update(
        op="get_attr", target="dense.forward.__globals__", args=[]
    ),
    "get_attr of a method": lambda d: node(d, "call_module").update(
        op="get_attr", target="dense.forward", args=[]
    ),
    "getattr": lambda d: node(d, "call_function").update(
        target="builtins.getattr", args=[{"node": "x"}, "__class__"]
    ),
    "getattr of a value": lambda d: node(d, "call_function").update(
        target="builtins.getattr", args=[{"node": "x"}, {"node": "x"}]
    ),
    "find": lambda d: node(d, "call_function").update(
        target="fxopt.objects.find", args=["os.system"], kwargs={}
    ),
    "build": lambda d: node(d, "call_function").update(
        target="fxopt.objects.build_object", args=["subprocess.Popen", {"dict": []}], kwargs={}
    ),
    "build by a value": lambda d: node(d, "call_function").update(
        target="fxopt.objects.build_object", args=[{"node": "x"}, {"dict": []}], kwargs={}
    ),
    "key": lambda d: node(d, "call_function").update(
        target="builtins.max", args=[[1, 2]], kwargs={"key": {"name": "torch.add"}}
    ),
    "module as argument": lambda d: node(d, "call_method").update(args=[{"node": "dense"}, {"module": 0}]),
    "guard as argument": lambda d: node(d, "call_method").update(
        args=[{"node": "dense"}, {"data": ["SizeGuard", {"condition": CODE, "source": ""}]}]
    ),
    "partial as argument": lambda d: node(d, "call_method").update(
        args=[{"node": "dense"}, {"partial": ["os.system", ["true"], {"dict": []}]}]
    ),
    "function as argument": lambda d: node(d, "call_method").update(
        args=[{"node": "dense"}, {"name": "torch.add"}]
    ),
    "class of layers as argument": lambda d: node(d, "call_method").update(
        args=[{"node": "dense"}, {"name": "torch.nn.modules.linear.Linear"}]
    ),
    "build a layer": lambda d: node(d, "call_function").update(
        target="fxopt.objects.build_object", args=["torch.nn.modules.linear.Linear", {"dict": []}], kwargs={}
    ),
    "find what makes attributes": lambda d: node(d, "call_function").update(
        target="fxopt.objects.find", args=["builtins.getattr"], kwargs={}
    ),
    "attribute that is called as a method": lambda d: node(d, "call_function").update(
        target="fxopt.objects.build_object",
        args=["transformers.cache_utils.DynamicCache", {"dict": [["to", {"node": "x"}]]}],
        kwargs={},
    ),
    "call of an attribute of caches": lambda d: node(d, "call_method").update(target="values"),
    "layer as a value": lambda d: node(d, "call_module").update(op="get_attr", args=[]),
    "getattr as a layer": lambda d: layer(d)["attributes"].update(forward={"name": "builtins.getattr"}),
    "class as a layer": lambda d: layer(d)["attributes"].update(
        forward={"name": "torch.nn.modules.linear.Linear"}
    ),
    "function with arguments as a layer": lambda d: layer(d)["attributes"].update(
        forward={"partial": ["fxopt.packing._unpacked", {"tuple": []}, {"dict": []}]}
    ),
    "kind": lambda d: node(d, "call_method").update(args=[{"pickle": "gASVAAAA"}]),
    "two kinds": lambda d: node(d, "call_method").update(args=[{"node": "x", "float": "nan"}]),
    "operation": lambda d: node(d, "call_method").update(op="root"),
    "a later node": lambda d: node(d, "call_method").update(args=[{"node": "output"}]),
    "twice": lambda d: d["nodes"].append(dict(d["nodes"][0])),
    "layer": lambda d: layer(d).update({"class": "torch.nn.modules.module.torch.load"}),
    "class of a layer": lambda d: layer(d).update({"class": "torch.jit._script.ScriptModule"}),
    "function as a layer": lambda d: layer(d).update({"class": "torch.add"}),
    "attribute": lambda d: layer(d)["attributes"].update(forward={"name": "os.system"}),
    "hook": lambda d: layer(d)["attributes"].update(_forward_hooks={"dict": [[0, {"name": "torch.add"}]]}),
    "guard without its checks": lambda d: next(
        m for m in d["modules"] if m["class"].endswith("InputGuard")
    ).update(attributes={"_formulas": {"dict": []}, "training": False}),
    "child": lambda d: d["modules"][0]["children"].update({"__class__": 1}),
    "child that is not there": lambda d: d["modules"][0]["children"].update(dense=99),
    "parameter that is not there": lambda d: layer(d)["parameters"].update(weight="gone"),
    "derived": lambda d: d["modules"][0]["attributes"].update(_code="x"),
    "step": lambda d: d["modules"][0]["attributes"].update(
        step={"data": ["Step", {"name": "", "signature": "", "transformation": {"bytes": "80"}}]}
    ),
    "configuration": lambda d: layer(d)["attributes"].update(config={"config": ["os.system", {"dict": []}]}),
    "strides": lambda d: d["tensors"]["dense.weight"].update(stride=[400, 1], offset=0),
    "size": lambda d: d["tensors"]["dense.weight"].update(shape=[4, 5]),
    "dtype": lambda d: d["tensors"]["dense.weight"].update(dtype="torch.float64"),
    "entry": lambda d: d["tensors"]["dense.weight"].update(entry="gone"),
    "device": lambda d: d["tensors"]["dense.weight"].update(device="nowhere:0"),
    "class name": lambda d: d.update(class_name=CODE),
    "no nodes": lambda d: d.pop("nodes"),
    "no weights": lambda d: d.pop("weights"),
    "no modules": lambda d: d.update(modules=[]),
}


@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS)
def test_a_forged_graph(edit, folder, monkeypatch):
    monkeypatch.setattr(os, "system", lambda command: pytest.fail("it ran a command"))
    change(folder, edit)
    with pytest.raises(fxopt.LoadError, match=r"saved.*(graph.json|model.safetensors)"):
        fxopt.load(folder)


def test_a_configuration_is_data_unless_its_class_is_trusted(folder, monkeypatch):
    """`from_dict` of a configuration may ask the hub for a name that the folder gives, as that of Detr for a backbone."""
    from transformers import DetrConfig

    def asked(*args, **kwargs):
        raise AssertionError("it asks the hub")

    monkeypatch.setattr(DetrConfig, "from_dict", asked)
    saved = {"config": [f"{DetrConfig.__module__}.DetrConfig", {"dict": [["backbone", "someone/repo"]]}]}
    change(folder, lambda d: d["modules"][0]["attributes"].update(config=saved))
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
from fxopt.saving.allowed import NameRefused, Names
Names().find("torch.add")  # fills the tables
before = set(sys.modules)
for name in (
    "transformers.trainer.Trainer",
    "transformers.pipelines.text_generation.ReturnType",
    "torch.nn.modules.linear.json.tool.main",
    "fxopt.doctor._Two",
    "fxopt.passes.unknown.Pass",
):
    try:
        Names().find(name)
    except NameRefused:
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
        record = next(m for m in document["modules"] if m["class"].endswith("PassRecord"))
        return [edit["data"] for edit in record["attributes"]["steps"][0]["data"][1]["edits"]["tuple"]]

    def swap(document):
        return next(fields for kind, fields in edits(document) if kind == "Swapped")

    def before(document):
        states = [fields["before"] for kind, fields in edits(document) if kind == "NodeEdit"]
        return next(state["data"][1] for state in states if state)

    forged = {
        "restore": lambda d: swap(d).update(
            restore={"partial": ["os.system", {"tuple": ["true"]}, {"dict": []}]}
        ),
        "bare": lambda d: swap(d).update(restore={"name": "torch.Tensor.backward"}),
        "target": lambda d: before(d).update(op="call_function", target={"name": "os.system"}),
        "method": lambda d: before(d).update(op="call_method", target=CODE),
        "argument": lambda d: before(d).update(args={"tuple": [{"module": 0}]}),
        "path": lambda d: swap(d).update(left={"dict": [["__class__", None]]}),
    }
    for edit in forged.values():
        (tmp_path / "saved" / "graph.json").write_text(text)
        change(tmp_path / "saved", edit)
        with pytest.raises(fxopt.LoadError, match=r"graph.json"):
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
    function = small()
    next(n for n in function.graph.nodes if n.op == "call_function").target = Small
    method = small()
    next(n for n in method.graph.nodes if n.op == "call_method").target = "register_hook"
    return {
        "hook": (hooked, r"dense has hooks \(_forward_hooks\)"),
        "object": (held, r"dense.settings is or holds a builtins.object"),
        "meta": (meta, r"dense.weight is a tensor that has no data"),
        "sparse": (sparse, r"mask is a tensor that is laid out as torch.sparse_coo"),
        "parametrized": (parametrized, r"dense is parametrized, which makes it a class of its own"),
        "function": (function, r"calls or holds tests.test_saving_errors.Small"),
        "method": (method, r"calls or holds the method 'register_hook'"),
        "autograd": (fxopt.trace(Custom(), (X,)), r"calls or holds tests.capture.test_modes.Cube"),
        "no graph": (Small(), r"a Small is no graph module: capture it first"),
        "exported": (torch.export.export(Small(), (X,)).module(), r"takes its inputs by a \w+CodeGen"),
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


def test_a_folder_with_other_files_is_left_alone(folder):
    (folder / "notes.txt").write_text("mine")
    before = contents(folder)
    with pytest.raises(
        fxopt.SaveError, match=r"saved holds other files \(notes.txt\): give a folder for this module alone"
    ):
        fxopt.save(small(), folder)
    assert contents(folder) == before
    (folder.parent / "file").write_text("mine")
    with pytest.raises(fxopt.SaveError, match=r"file is a file"):
        fxopt.save(small(), folder.parent / "file")
    assert (folder.parent / "file").read_text() == "mine"


def test_a_link_to_a_folder_stays_a_link(folder):
    link = folder.parent / "link"
    link.symlink_to(folder)
    fxopt.save(fxopt.trace(nn.ReLU(), (X,)), link)
    assert link.is_symlink()
    assert fxopt.load(folder).code == fxopt.load(link).code


def test_the_weights_of_another_save_are_noticed(folder):
    fxopt.save(small(), folder.parent / "other")
    shutil.copy(folder.parent / "other" / "model.safetensors", folder)
    with pytest.raises(fxopt.LoadError, match=r"model.safetensors was changed"):
        fxopt.load(folder)


def test_weights_that_are_no_safetensors(folder):
    (folder / "model.safetensors").write_bytes(b"\xff" * 64)

    def forge(document):
        document["weights"] = {"bytes": 64, "sha256": files._digest(folder / "model.safetensors")}

    change(folder, forge)
    with pytest.raises(fxopt.LoadError, match=r"model.safetensors cannot be read"):
        fxopt.load(folder)
    safetensors.torch.save_file({}, folder / "model.safetensors")
    change(
        folder,
        lambda d: d.update(
            weights={
                "bytes": (folder / "model.safetensors").stat().st_size,
                "sha256": files._digest(folder / "model.safetensors"),
            }
        ),
    )
    with pytest.raises(fxopt.LoadError, match=r"KeyError"):
        fxopt.load(folder)


@pytest.mark.parametrize("given", [5, None, "model"])
def test_what_is_no_module_is_named(given, tmp_path):
    with pytest.raises(
        fxopt.SaveError, match=f"a {type(given).__name__} is no graph module: capture it first"
    ):
        fxopt.save(given, tmp_path / "saved")


def test_a_name_that_cannot_be_saved_is_to_be_renamed(tmp_path):
    model = nn.Module()
    model.register_buffer("two words", torch.ones(2))
    graph = torch.fx.Graph()
    graph.output(graph.get_attr("two words"))
    with pytest.raises(fxopt.SaveError, match=r"the path 'two words', .* Rename the module or tensor"):
        fxopt.save(torch.fx.GraphModule(model, graph), tmp_path / "saved")


@pytest.mark.parametrize("at", [files.GRAPH, files.WEIGHTS])
def test_a_folder_that_is_saved_anew_while_it_is_read_is_read_whole(at, tmp_path, monkeypatch):
    first, second = (fxopt.trace(nn.Linear(2, 2), (torch.ones(1, 2),)) for _ in range(2))
    fxopt.save(first, tmp_path / "saved")
    read, saves = files._explained, [second]

    def explained(path):
        if path.name == at and saves:  # another process, just before this one reads the file
            fxopt.save(saves.pop(), tmp_path / "saved")
        return read(path)

    monkeypatch.setattr(files, "_explained", explained)
    loaded = fxopt.load(tmp_path / "saved")
    assert all(map(torch.equal, loaded.parameters(), second.parameters()))


@pytest.mark.parametrize("linked", [False, True])
def test_a_folder_that_a_broken_off_save_had_moved_away_is_named(linked, tmp_path):
    fxopt.save(fxopt.trace(nn.Linear(2, 2), (torch.ones(1, 2),)), tmp_path / "saved")
    (tmp_path / "saved").rename(tmp_path / ".saved.old-12345678")
    folder = tmp_path / "saved"
    if linked:
        folder = tmp_path / "elsewhere" / "link"
        folder.parent.mkdir()
        folder.symlink_to(tmp_path / "saved")
    with pytest.raises(fxopt.LoadError, match=r"broken off when it had moved it to .*\.saved\.old-12345678"):
        fxopt.load(folder)


def test_the_current_folder_stays(folder, monkeypatch):
    monkeypatch.chdir(folder)
    before = contents(folder)
    for name in (".", folder):
        with pytest.raises(fxopt.SaveError, match=r"saved is the current folder, which would be replaced"):
            fxopt.save(small(), name)
    assert contents(Path()) == before
    fxopt.save(small(), "inside")
    assert fxopt.load("inside")(X).shape == (3, 4)


def test_a_save_that_another_one_overtakes(folder, monkeypatch):
    replace, others = os.replace, [small(), small()]

    def overtaken(source, target):
        if Path(target) == folder and others:  # another process, between the two renames of this one
            fxopt.save(others.pop(), folder)
        replace(source, target)

    monkeypatch.setattr(os, "replace", overtaken)
    last = small()
    fxopt.save(last, folder)
    assert not others
    assert os.listdir(folder.parent) == ["saved"]
    assert torch.equal(fxopt.load(folder).dense.weight, last.dense.weight)


def test_a_device_that_is_not_there_is_named(folder):
    change(folder, lambda d: d["tensors"]["dense.weight"].update(device="cuda:99"))
    with pytest.raises(
        fxopt.LoadError, match=r"puts dense.weight to 'cuda:99', which is not to be had here.* device=\"cpu\""
    ):
        fxopt.load(folder)
    assert fxopt.load(folder, device="cpu")(X).shape == (3, 4)
