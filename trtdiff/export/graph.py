"""From a traced model to the canonical graph of a component, and to a file that refers to weights.

The canonical graph computes in float32. An initializer is a reference to the stored tensor in its stored type; where
that is not float32, one `Cast` follows it, so precision is a later pass's choice and no weight was touched here.

Names say where things come from: initializers have the checkpoint's own names (`down_blocks.0.resnets.0.conv1.weight`),
nodes are `<module>/<operator>` and their outputs have the node's name; the metadata `module` of a node is its PyTorch
module's path. Nothing in the file names a path, a class or a line of the machine that exported it.
"""

import ast
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trtdiff import __version__
from trtdiff.errors import ExportError
from trtdiff.export.dims import name_dims
from trtdiff.export.safetensors_index import TensorRef
from trtdiff.families.base import ComponentSpec
from trtdiff.passes.simplify import simplify

if TYPE_CHECKING:
    import onnx_ir as ir

MODULE = "module"
"""Metadata key of a node: the path of the PyTorch module that it came from."""


def canonical_graph(model: "ir.Model", spec: ComponentSpec) -> None:
    """Simplify a traced model and give everything in it its name; weights have no value yet.

    Raises ExportError where the trace broke the contract: a dimension that became a number, or means something else.
    """
    simplify(model)
    name_dims(model.graph, spec)
    _name_initializers(model.graph, spec)
    _name_nodes(model.graph, spec)
    _strip(model, spec)


def needed_weights(model: "ir.Model") -> dict[str, tuple[int, ...]]:
    """Give the stored tensors that a canonical graph refers to, with their shapes."""
    return {
        name: tuple(dim for dim in value.shape or () if isinstance(dim, int))
        for name, value in model.graph.initializers.items()
        if value.const_value is None
    }


def refer_to_weights(model: "ir.Model", places: Mapping[str, TensorRef], folder: Path) -> None:
    """Let every weight be a reference into a file below `folder`, cast to the type the graph computes in."""
    import onnx_ir as ir

    graph = model.graph
    weights = {name: graph.initializers[name] for name in needed_weights(model)}
    for name, value in weights.items():
        place = places[name]
        computed_in = value.dtype
        stored_as = _data_type(place.dtype)
        value.const_value = ir.ExternalTensor(
            place.file.relative_to(folder).as_posix(),
            place.offset,
            place.nbytes,
            stored_as,
            shape=ir.Shape(place.shape),
            name=name,
            base_dir=folder,
        )
        value.dtype = stored_as
        if computed_in is not None and computed_in != stored_as:
            _cast_before_use(value, computed_in)


def write_graph(model: "ir.Model", path: Path) -> None:
    """Infer what types and shapes are still open, check the graph, and write the file.

    Equal graphs give equal bytes. Raises ExportError where shapes contradict each other, and BuildError for what
    `check_graph` refuses.
    """
    import onnx_ir as ir

    from trtdiff.passes.check_graph import check_graph  # which needs this module's name for modules

    _infer_shapes(model)
    check_graph(model)
    proto = ir.to_proto(model)
    path.write_bytes(proto.SerializeToString(deterministic=True))


# --- references ------------------------------------------------------------------------------------------------------


def _data_type(dtype: str) -> "ir.DataType":
    import onnx_ir as ir

    return ir.DataType.from_numpy(_numpy_dtype(dtype))


def _numpy_dtype(dtype: str) -> Any:
    import ml_dtypes
    import numpy as np

    return np.dtype(getattr(ml_dtypes, dtype, dtype))


def _cast_before_use(value: "ir.Value", to: "ir.DataType") -> None:
    import onnx_ir as ir

    uses = list(value.uses())
    graph = value.graph
    assert isinstance(graph, ir.Graph), "an initializer of a graph"  # noqa: S101 - an invariant
    cast = ir.node("Cast", [value], {"to": int(to)}, name=f"{value.name}/Cast")
    (output,) = cast.outputs
    output.name, output.shape, output.dtype = f"{value.name}/Cast", value.shape, to
    first = min((use.node for use in uses), key=graph.index) if len(uses) > 1 else uses[0].node
    cast.metadata_props[MODULE] = first.metadata_props.get(MODULE, "")
    for use in uses:
        use.node.replace_input_with(use.idx, output)
    graph.insert_before(first, cast)


# --- names -----------------------------------------------------------------------------------------------------------


def _name_initializers(graph: "ir.Graph", spec: ComponentSpec) -> None:
    import onnx_ir as ir

    values, named, constants = [], [], 0
    for name, value in graph.initializers.items():
        values.append(value)
        if name.startswith(f"{spec.prefix}."):
            named.append(name.removeprefix(f"{spec.prefix}."))
        else:
            named.append(f"constant_{constants}")
            constants += 1
    ir.convenience.rename_values(values, named)


def _name_nodes(graph: "ir.Graph", spec: ComponentSpec) -> None:
    taken: Counter[str] = Counter()
    kept = {value.name for value in graph.outputs}
    for node in graph:
        module = _module(node, spec)
        name = f"{module}/{node.op_type}" if module else node.op_type
        taken[name] += 1
        if taken[name] > 1:
            name = f"{name}_{taken[name]}"
        node.name = name
        node.metadata_props.clear()
        node.metadata_props[MODULE] = module
        node.doc_string = None
        for index, output in enumerate(node.outputs):
            if output.name not in kept:
                output.name = f"{name}:{index}" if index else name


def _module(node: "ir.Node", spec: ComponentSpec) -> str:
    """Read the module path out of what the exporter wrote: the scopes from the outside in, then the node's own name."""
    scopes = node.metadata_props.get("pkg.torch.onnx.name_scopes")
    path = ast.literal_eval(scopes)[-2:-1] if scopes else []
    module = str(path[0]).partition("@")[0] if path else ""
    if module.startswith("_"):  # the exporter's word for what belongs to no module, such as the sizes of inputs
        return ""
    return module.removeprefix(spec.prefix).removeprefix(".")


def _strip(model: "ir.Model", spec: ComponentSpec) -> None:
    graph = model.graph
    graph.name, graph.doc_string, model.doc_string = spec.name, None, None
    model.producer_name, model.producer_version, model.domain = "trtdiff", __version__, None
    model.metadata_props.clear()
    graph.metadata_props.clear()
    for value in (*graph.inputs, *graph.initializers.values(), *(out for node in graph for out in node.outputs)):
        value.metadata_props.clear()
        value.doc_string = None


# --- shapes that the exporter left open ------------------------------------------------------------------------------


def _infer_shapes(model: "ir.Model") -> None:
    """Let ONNX infer types and shapes, and take them where the exporter gave none."""
    import onnx
    import onnx_ir as ir

    graph = model.graph
    for value in graph.initializers.values():
        if value.type is None and value.const_value is not None:
            value.type = ir.TensorType(value.const_value.dtype)
    try:
        inferred = onnx.shape_inference.infer_shapes(ir.to_proto(model), strict_mode=True, data_prop=True)
    except onnx.shape_inference.InferenceError as error:
        first = str(error).strip().splitlines()[-1]
        raise ExportError(f"the graph's shapes contradict each other: {first}", where=f"graph {graph.name}") from None
    known = {info.name: ir.serde.deserialize_value_info_proto(info, None) for info in inferred.graph.value_info}
    for node in graph:
        for value in node.outputs:
            found = known.get(value.name or "")
            if found is None:
                continue
            if value.type is None:
                value.type = found.type
            if value.shape is None and found.shape is not None:
                value.shape = ir.Shape([_inferred(dim) for dim in found.shape])


def _inferred(dim: "int | ir.SymbolicDim") -> int | str | None:
    """Keep what inference knows; names that it made up (`unk__0`) say nothing."""
    if isinstance(dim, int):
        return dim
    return None if dim.value is None or dim.value.startswith("unk__") else dim.value
