"""What can go wrong between a PyTorch module and a graph, with modules that do it."""

import subprocess
import sys

import numpy as np
import pytest

from trtdiff.errors import ExportError, UsageError
from trtdiff.export import check
from trtdiff.export.check import relative_l2
from trtdiff.export.contract import verify_graph
from trtdiff.export.export import export_components
from trtdiff.export.safetensors_index import read_index
from trtdiff.families.base import ComponentSpec
from trtdiff.types import TensorSpec

torch = pytest.importorskip("torch")
pytest.importorskip("onnxscript")


def component(forward, **options):
    """A component whose module has one linear layer in a submodule and does `forward(self, x)`."""

    class Inner(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(4, 4)
            self.register_buffer("numbers", torch.arange(4.0), persistent=False)

        def forward(self, x):
            return forward(self, x)

    class Outer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = torch.nn.Sequential(Inner())

        def forward(self, x):
            return self.model(x)

    dims = ("batch", "height/8", 4)
    return ComponentSpec(
        **{"name": "toy", "folder": "toy", "inputs": (TensorSpec("x", "float32", dims),),
           "outputs": (TensorSpec("y", "float32", dims),), "build": lambda _: Outer(), "prefix": "model", **options}
    )  # fmt: skip


@pytest.fixture
def toy(tmp_path):
    """Export a component with random weights; gives its folder."""
    from safetensors.numpy import save_file

    random = np.random.default_rng(0)
    save_file(
        {"0.linear.weight": random.standard_normal((4, 4)).astype(np.float32),
         "0.linear.bias": random.standard_normal(4).astype(np.float32)}, tmp_path / "toy.safetensors",
    )  # fmt: skip
    (tmp_path / "out").mkdir()

    def make(spec, **options):
        list(export_components([spec], {}, read_index(tmp_path / "toy.safetensors"), tmp_path / "out", **options))
        return tmp_path / "out"

    return make


def test_constants_that_are_not_stored_have_their_true_values(toy):
    import onnx

    folder = toy(component(lambda self, x: self.linear(x) * self.numbers))
    model = onnx.load(str(folder / "toy.onnx"), load_external_data=False)
    embedded = {t.name: onnx.numpy_helper.to_array(t) for t in model.graph.initializer if not t.external_data}
    assert embedded["0.numbers"].tolist() == [0, 1, 2, 3]


def test_an_operator_that_writes_into_its_input_is_decomposed(toy):
    def forward(self, x):
        y = self.linear(x)
        y.add_(1).mul_(self.numbers)
        return y

    toy(component(forward))  # the check compares


def test_a_size_that_becomes_a_number_is_an_error(toy):
    with pytest.raises(ExportError, match="'height/8' became 11") as caught:
        toy(component(lambda self, x: self.linear(x) + torch.arange(x.shape[1]).reshape(11, 1)))
    assert caught.value.where == "toy, input x"


def test_an_output_of_another_size_is_an_error(toy):
    with pytest.raises(ExportError, match=r"'height/8' became '2\*s") as caught:
        toy(component(lambda self, x: torch.cat([self.linear(x), x], dim=1)))
    assert caught.value.where == "toy, output y"


def test_a_value_that_was_baked_in_fails_the_check(toy):
    def forward(self, x):
        return self.linear(x) * (11 if torch.compiler.is_exporting() else x.shape[1])

    with pytest.raises(ExportError, match="output y differs from PyTorch") as caught:
        toy(component(forward))
    assert "height" in caught.value.where
    assert "--no-check" in caught.value.hint
    assert toy(component(forward), check=False)


def test_a_trace_that_fails_names_the_module(toy):
    def forward(self, x):
        return self.linear(x) if x.sum() > 0 else x

    with pytest.raises(ExportError, match="toy cannot be traced") as caught:
        toy(component(forward))
    assert caught.value.where == "toy, module model.0 (Inner)"


def test_an_operator_without_translation_names_the_module(toy):
    with pytest.raises(ExportError, match=r"cannot be translated.*No ONNX function.*lgamma") as caught:
        toy(component(lambda self, x: self.linear(torch.lgamma(x))))
    assert caught.value.where == "toy, module model.0"


def test_a_config_that_fits_no_module_is_named(toy):
    def build(config):
        raise TypeError("unexpected field 'rope'")

    with pytest.raises(ExportError, match="unexpected field 'rope'") as caught:
        toy(component(None, build=build))
    assert caught.value.where == "toy/config.json"


def test_too_little_memory_is_said_before(toy, monkeypatch):
    monkeypatch.setattr(check, "available_memory", lambda: 10**8)
    with pytest.raises(UsageError, match=r"takes about 0\.7 GB, 0\.1 GB are free") as caught:
        toy(component(lambda self, x: self.linear(x)))
    assert "--no-check" in caught.value.hint


# --- the file as it was written --------------------------------------------------------------------------------------


def rename_input(model):
    model.graph.input[0].name = "z"
    model.graph.node[-1].input[0] = "z"


def rename_dim(model):
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_param = "n"


def change_type(model):
    model.graph.output[0].type.tensor_type.elem_type = 10


def older_opset(model):
    model.opset_import[0].version = 22


def embed(model):
    import onnx

    model.graph.initializer.append(onnx.numpy_helper.from_array(np.zeros(20_000, np.float32), "big"))


def leave_the_folder(model):
    weight = next(tensor for tensor in model.graph.initializer if tensor.external_data)
    next(item for item in weight.external_data if item.key == "location").value = "../toy.safetensors"


def read_beyond(model):
    weight = next(tensor for tensor in model.graph.initializer if tensor.external_data)
    next(item for item in weight.external_data if item.key == "offset").value = "100000"


def add_a_trace(model):
    item = model.graph.node[0].metadata_props.add()
    item.key, item.value = "stack_trace", "File model.py, line 1"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (rename_input, "inputs are z, the contract is x"),
        (rename_dim, r"x: float32\[n, height/8, 4\], the contract is x: float32\[batch"),
        (change_type, r"y: float16.*the contract is y: float32"),
        (older_opset, "22"),
        (embed, "80.* bytes are embedded"),
        (leave_the_folder, "no file inside"),
        (read_beyond, "refers to byte"),
        (add_a_trace, "stack_trace"),
    ],
)
def test_a_file_that_breaks_the_contract_is_refused(toy, damage, message):
    import onnx

    spec = component(lambda self, x: self.linear(x))
    path = toy(spec, check=False) / "toy.onnx"
    verify_graph(path, spec)
    model = onnx.load(str(path), load_external_data=False)
    damage(model)
    path.write_bytes(model.SerializeToString())
    with pytest.raises(ExportError, match=message):
        verify_graph(path, spec)


# --- small things ----------------------------------------------------------------------------------------------------


def test_comparing_nothing_never_passes():
    one = np.ones(3, np.float32)
    assert relative_l2(one, one) == 0
    for got, expected in [(one, np.ones(2)), (one[:0], one[:0]), (one * np.nan, one), (one, one * 0)]:
        assert not relative_l2(got, expected) <= check.BOUND


def test_help_imports_nothing_heavy():
    code = (
        "import sys; from trtdiff.cli import exit_code; exit_code(['export', '--help']);"
        "print({'torch', 'onnx', 'diffusers', 'onnx_ir'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "--no-check" in done.stdout
    assert done.stdout.rstrip().endswith("set()")
