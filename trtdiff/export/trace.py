"""Trace a component without its weights: fake parameters in, an ONNX graph with named, empty initializers out.

1. The module is built with `torch.empty` making *fake* tensors (shape and type, no bytes), so parameters cost nothing,
   whereas whatever a module computes for itself (position ids, masks) is computed for real and has its true values.
2. `torch.export` traces it at one size, with every symbolic dimension of the contract dynamic.
3. `torch.onnx` translates the program, operator by operator, at opset 23. Its decompositions are left out, since they
   trace the whole program twice more: every operator of these models has a translation, its own or one of
   `_translations`. Where one has none, or writes into its input, the decompositions run after all.
"""

import inspect
import logging
import math
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from trtdiff.errors import ExportError, MissingDependency
from trtdiff.export.unfilled import build_unfilled, causes, reason, unfilled_names
from trtdiff.families.base import ComponentSpec, Config
from trtdiff.types import names

if TYPE_CHECKING:
    import onnx_ir as ir
    import torch

OPSET = 23
TRACED_AT = {"batch": 2, "height": 11, "width": 13, "tokens": 7, "context": 17, "long_tokens": 19}
"""Sizes of the trace, in units of a dimension's divisor: unlike each other, and odd, so that no coincidence hides."""


def sizes_of(spec: ComponentSpec, units: Mapping[str, int]) -> dict[str, int]:
    """Give every symbolic dimension of a component a size: so many units of its divisor (`height/8`: 8)."""
    divisors: dict[str, int] = {}
    for tensor in (*spec.inputs, *spec.outputs):
        for dim in tensor.dims:
            if isinstance(dim, str):
                name, _, divisor = dim.partition("/")
                divisors[name] = math.lcm(divisors.get(name, 1), int(divisor or 1))
    for name in divisors.keys() & {"height", "width"}:
        divisors[name] = math.lcm(divisors[name], spec.multiple)
    return {name: units[name] * divisor for name, divisor in divisors.items()}


def trace(spec: ComponentSpec, config: Config) -> "ir.Model":
    """Give the graph of a component, its initializers named as in the built module; weights have no value yet.

    Raises ExportError naming the component and the PyTorch module where it failed.
    """
    _require_compile_extra()
    import torch

    fake = fake_mode()
    with _quiet():
        module = build_unfilled(spec, config, fake)
        sizes = sizes_of(spec, TRACED_AT)
        with fake:
            example = tuple(torch.zeros(t.shape(sizes), dtype=getattr(torch, t.dtype)) for t in spec.inputs)
        symbolic = torch.export.Dim.DYNAMIC
        shapes = [{i: symbolic for i, dim in enumerate(t.dims) if isinstance(dim, str)} for t in spec.inputs]
        dynamic = _as_arguments(module, shapes)
        try:
            with torch.no_grad():
                program = torch.export.export(module, example, dynamic_shapes=dynamic, strict=False)
        except Exception as error:  # torch raises whatever the model's own code does under tracing
            _refuse_fixed_dim(error, module, spec)
            raise ExportError(
                f"{spec.name} cannot be traced: {reason(error)}", where=_failing_module(error, module, spec)
            ) from error
        model = _translate(program, spec)
    weights = unfilled_names(module)
    for name, value in model.graph.initializers.items():
        if name in weights:
            value.const_value = None  # known by name, shape and type alone: nothing can fold it
    return model


def _as_arguments(module: "torch.nn.Module", values: list[Any]) -> tuple[Any, ...]:
    """Lay values out as the module's positional arguments: what falls to `*rest` is a tuple of its own."""
    kinds = [parameter.kind for parameter in inspect.signature(module.forward).parameters.values()]
    own = kinds.index(inspect.Parameter.VAR_POSITIONAL) if inspect.Parameter.VAR_POSITIONAL in kinds else len(values)
    return (*values[:own], tuple(values[own:])) if len(values) > own else tuple(values)


def fake_mode() -> Any:
    """Give a mode whose tensors have symbolic sizes and no bytes."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    return FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())


def _require_compile_extra() -> None:
    needed = ("torch", "diffusers", "transformers", "onnx", "onnx_ir", "onnxscript")
    if missing := [name for name in needed if find_spec(name) is None]:
        raise MissingDependency(
            f"export needs the extra `compile`: {names(missing)} cannot be imported",
            hint="pip install 'trtdiff[compile]'",
        )


# --- translation -----------------------------------------------------------------------------------------------------


def _translate(program: Any, spec: ComponentSpec) -> "ir.Model":
    import torch

    def to_onnx() -> "ir.Model":
        made: Any = torch.onnx.export(
            program,
            dynamo=True,
            opset_version=OPSET,
            optimize=False,
            verbose=False,
            custom_translation_table=_translations(),
            input_names=[tensor.name for tensor in spec.inputs],
            output_names=[tensor.name for tensor in spec.outputs],
        )
        model: ir.Model = made.model
        return model

    first: Exception | None = None
    if _functional(program):
        program.run_decompositions = lambda *_: program  # already what the translation takes
        try:
            return to_onnx()
        except Exception as error:  # noqa: BLE001 - the exporter's errors are private classes
            first = error
        del program.run_decompositions
    try:
        return to_onnx()
    except Exception as error:  # the exporter's errors are private classes
        where = _module_of_node(first or error, program, spec)
        raise ExportError(f"{spec.name} cannot be translated to ONNX: {reason(error)}", where=where) from error


def _functional(program: Any) -> bool:
    """Whether no operator writes into its input."""
    return not any(getattr(getattr(node.target, "_schema", None), "is_mutable", False) for node in program.graph.nodes)


def _translations() -> dict[Any, Any]:
    """Translate what torch.onnx otherwise takes apart by decomposition."""
    import torch
    from onnxscript import opset23 as op

    def to_dtype(x: Any, dtype: int, non_blocking: bool = False, copy: bool = False, memory_format: Any = None) -> Any:  # noqa: ARG001, FBT001, FBT002
        return op.Cast(x, to=dtype)

    def dropout(x: Any, p: float, train: bool) -> Any:  # noqa: ARG001, FBT001
        return op.Identity(x)

    def squeeze(x: Any, dim: int) -> Any:
        """Leave a dimension that is not 1, as PyTorch does: a symbolic one never is, the trace has made sure."""
        axes: Any = op.Constant(value_ints=[dim])
        return op.Squeeze(x, axes) if x.shape[dim] == 1 else op.Identity(x)

    def to_device(x: Any, device: Any, dtype: int) -> Any:  # noqa: ARG001 - a graph has no devices
        return op.Cast(x, to=dtype)

    def to_layout(x: Any, dtype: int, layout: Any = None, device: Any = None) -> Any:  # noqa: ARG001 - nor layouts
        return op.Cast(x, to=dtype)

    def split(x: Any, split_size: int, dim: int = 0) -> Any:
        """Give tensors, not a sequence of them, which compilers do not take."""
        return op.Split(x, axis=dim, num_outputs=-(-x.shape[dim] // split_size))

    def split_with_sizes(x: Any, split_sizes: Sequence[Any], dim: int = 0) -> Any:
        """Cut by slices: sizes may be dynamic, and a `Split` into them would be a sequence."""
        first: Any = op.Constant(value_ints=[-1])
        sizes = [
            op.Reshape(size, first) if hasattr(size, "shape") else op.Constant(value_ints=[size])
            for size in split_sizes
        ]
        axis: Any = op.Constant(value_ints=[dim])
        begin: Any = op.Constant(value_ints=[0])
        parts = []
        for size in sizes:
            end: Any = op.Add(begin, size)
            parts.append(op.Slice(x, begin, end, axis))
            begin = end
        return tuple(parts)

    aten = torch.ops.aten
    return {
        aten.to.dtype: to_dtype, aten.to.device: to_device, aten.dropout.default: dropout, aten.squeeze.dim: squeeze,
        aten.to.dtype_layout: to_layout,
        aten.split.Tensor: split,
        aten.split_with_sizes.default: split_with_sizes,
    }  # fmt: skip


# --- saying what went wrong ------------------------------------------------------------------------------------------


def _refuse_fixed_dim(error: BaseException, module: "torch.nn.Module", spec: ComponentSpec) -> None:
    """Raise ExportError in the contract's words where some code made a dynamic dimension a number."""
    found = re.search(r"L\['(\w+)'\]\.size\(\)\[(\d+)\].* specialized it to be a constant \((\d+)\)", str(error))
    arguments = list(inspect.signature(module.forward).parameters)
    if found is not None and found[1] in arguments:
        tensor = spec.inputs[arguments.index(found[1])]
        raise ExportError(
            f"dimension {tensor.dims[int(found[2])]!r} became {found[3]} in the trace",
            where=f"{spec.name}, input {tensor.name}",
            hint="some code of the model depends on this size; the graph would not",
        ) from error


def _failing_module(error: BaseException, module: "torch.nn.Module", spec: ComponentSpec) -> str:
    """Name the innermost PyTorch module whose code was running."""
    import torch

    paths = {id(part): path for path, part in module.named_modules()}
    found, frames = "", error.__traceback__
    while frames is not None:
        running = frames.tb_frame.f_locals.get("self")
        if isinstance(running, torch.nn.Module) and paths.get(id(running)):
            found = f"{paths[id(running)]} ({type(running).__name__})"
        frames = frames.tb_next
    return f"{spec.name}, module {found}" if found else spec.name


def _module_of_node(error: BaseException, program: Any, spec: ComponentSpec) -> str:
    """Name the PyTorch module of the operator that has no translation, which the exporter's message names."""
    match = re.search(r"node %(\w+)", "\n".join(map(str, causes(error))))
    for node in program.graph.nodes:
        if match is not None and node.name == match[1]:
            stack = [path for path, _ in node.meta.get("nn_module_stack", {}).values()]
            return f"{spec.name}, module {names(stack[-1:])}"
    return spec.name


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep the exporter's chatter (missing torchvision, deprecations) off the terminal."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
