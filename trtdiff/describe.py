"""What a file or folder is, in words: checkpoints, exports, graphs, bundles, engines, pictures, receipts and more.

`KINDS` lists them; each recognises its own path and describes it. Nothing here loads weights.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trtdiff.bundle import BUNDLE_FILE, SAMPLERS_FILE, Bundle
from trtdiff.errors import ArtefactError, MissingDependency, UsageError
from trtdiff.export.manifest import EXPORT_FILE, EXPORT_SCHEMA, ExportManifest
from trtdiff.manifest import MANIFEST_FILE, read_manifest
from trtdiff.records import read_record


@dataclass(frozen=True)
class Table:
    """Rows under headings."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Description:
    """What something is."""

    kind: str
    path: str
    facts: dict[str, Any]
    tables: tuple[Table, ...] = field(default=())


def describe(path: Path) -> Description:
    """Say what stands at `path`. Raises UsageError where nothing is there or nobody knows it."""
    if not path.exists():
        raise UsageError(f"there is nothing at {path}", hint="name a file or folder")
    for recognises, explain in KINDS:
        if recognises(path):
            return explain(path)
    raise UsageError(
        f"{path} is nothing that trtdiff knows",
        hint="it explains checkpoints, exports, .onnx files, bundles, engines, calibrations, sampler tables, "
        "pictures and receipts",
    )


def _has(*names: str) -> Callable[[Path], bool]:
    """Recognise a folder that holds one of these files, or such a file itself."""
    return lambda path: any((path / name).is_file() or path.name == name for name in names)


def _suffix(suffix: str) -> Callable[[Path], bool]:
    return lambda path: path.is_file() and path.suffix.lower() == suffix


def _folder(path: Path) -> Path:
    return path if path.is_dir() else path.parent


def _size(size: float) -> str:
    """Bytes in a unit that people read."""
    for unit in ("B", "kB", "MB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} GB"


def _checkpoint(path: Path) -> Description:
    from trtdiff.checkpoint import Checkpoint

    single = path.is_file() and path.name != "model_index.json"
    checkpoint = Checkpoint.open(str(path if single else _folder(path)))
    rows = []
    for name, config in checkpoint.configs.items():
        if name == "model_index":
            continue
        kind = str(config.get("_class_name") or (config.get("architectures") or [""])[0])
        if name not in checkpoint.weighted:
            rows.append((name, kind, "", "", ""))
            continue
        tensors = checkpoint.tensors(name)
        counts = Counter(ref.dtype for ref in tensors.values())
        parameters = sum(_product(ref.shape) for ref in tensors.values())
        types = ", ".join(f"{count} {dtype}" for dtype, count in counts.most_common())
        rows.append(
            (name, kind, f"{parameters / 1e6:.1f} M", types, _size(sum(ref.nbytes for ref in tensors.values())))
        )
    facts = {"pipeline": checkpoint.pipeline, "revision": checkpoint.revision, "files": list(checkpoint.notes)}
    columns = ("component", "class", "parameters", "tensors", "size")
    kind = "checkpoint in one file" if single else "diffusers checkpoint"
    return Description(kind, str(path), facts, (Table("components", columns, tuple(rows)),))


def _export(path: Path) -> Description:
    folder = _folder(path)
    manifest = read_record(folder / EXPORT_FILE, ExportManifest, schema=EXPORT_SCHEMA)
    rows = []
    for component in manifest.components:
        weights = sum((folder / name).stat().st_size for name in component.weights if (folder / name).is_file())
        for number, (spec_in, spec_out) in enumerate(_pairs(component.inputs, component.outputs)):
            first = (component.name, _size(_bytes_of(folder / component.graph)), _size(weights))
            rows.append((*(first if number == 0 else ("", "", "")), spec_in, spec_out))
    facts = {
        "name": manifest.name,
        "family": manifest.family,
        "checkpoint": _origin(manifest.checkpoint),
        "weights": manifest.dtype,
        "scheduler": manifest.scheduler.get("_class_name"),
        "made with": ", ".join(f"{name} {version}" for name, version in manifest.versions.items()),
    }
    components = Table("components", ("component", "graph", "weights", "inputs", "outputs"), tuple(rows))
    checks = Table("checked against PyTorch", ("component", "sizes", "relative L2"), tuple(_checks(manifest.checks)))
    return Description("export", str(path), facts, (components, checks))


def _checks(checks: Mapping[str, Any]) -> Iterable[tuple[str, str, str]]:
    """Give one row a component and shape; what was not checked says why."""
    for component, runs in checks.items():
        for run in runs if isinstance(runs, list) else [runs]:
            if not isinstance(run, Mapping) or "relative_l2" not in run:
                yield component, "", str(run)
                continue
            sizes = ", ".join(f"{name} {value}" for name, value in run["sizes"].items())
            yield component, sizes, ", ".join(f"{name} {value:.1e}" for name, value in run["relative_l2"].items())


def _bundle(path: Path) -> Description:
    bundle = Bundle.open(_folder(path))
    manifest = bundle.manifest
    rows = []
    for backend, keys in manifest.engines.items():
        for component, key in keys.items():
            made = bundle.engine_manifest(backend, component)
            size = sum(facts.size for facts in made.files.values())
            rows.append((backend, component, key[:12], _size(size), f"{made.seconds:.1f} s", _size(made.peak_memory)))
    facts = {
        "name": manifest.name,
        "family": manifest.family,
        "checkpoint": _origin(manifest.checkpoint),
        "weights": manifest.dtype,
        "precision": ", ".join(f"{precision} ({name})" for name, precision in manifest.precision.items()),
        "profile": str(manifest.profile),
        "latent": f"{manifest.facts.latent.channels} channels, 1/{manifest.facts.latent.downscale} of the pixels",
        "guidance by default": manifest.facts.guidance,
        "schedulers": ", ".join(manifest.samplers),
        "made by": f"trtdiff {manifest.trtdiff}",
    }
    columns = ("backend", "component", "key", "size", "built in", "peak memory")
    return Description("bundle", str(path), facts, (Table("engines", columns, tuple(rows)),))


def _engine(path: Path) -> Description:
    made = read_manifest(_folder(path) / MANIFEST_FILE)
    facts = {
        "key": made.key,
        **{name: value for name, value in made.spec.items() if not isinstance(value, dict | list)},
        "built in": f"{made.seconds:.1f} s, {_size(made.peak_memory)} at the peak",
        "realised": {name: value for name, value in made.realised.items() if name != "islands"},
    }
    files = tuple((name, _size(file.size), file.sha256[:12]) for name, file in made.files.items())
    bindings = tuple((left, right) for left, right in _pairs(made.inputs, made.outputs))
    parts = tuple(
        (name, json.dumps(value, ensure_ascii=False))
        for name, value in made.spec.items()
        if isinstance(value, dict | list)
    )
    islands = tuple((str(name), str(why)) for name, why in dict(made.realised.get("islands", {})).items())
    tables = (
        Table("files", ("file", "size", "sha256"), files),
        Table("bindings", ("inputs", "outputs"), bindings),
        *_layer_tables(_folder(path) / "engine"),
        *([Table("kept in float32", ("where", "why"), islands)] if islands else []),
        Table("made from", ("field", "value"), parts),
    )
    return Description("store entry", str(path), facts, tables)


def _layer_tables(engine: Path) -> Iterable[Table]:
    """Sum up the layers that a compiler listed: by kind and type, and by the PyTorch modules they compute."""
    from trtdiff.backends.tensorrt_layers import read_layers_file

    layers = read_layers_file(engine)
    if not layers:
        return
    kinds = Counter((layer.kind, layer.reads or "-", layer.writes or "-") for layer in layers)
    rows = tuple((*kind, str(count)) for kind, count in kinds.most_common())
    yield Table("layers by type", ("layer", "reads", "writes", "layers"), rows)
    modules: dict[str, Counter[str]] = {}
    for layer in layers:
        for module in {".".join(name.split(".")[:2]) or "(none)" for name in layer.modules or ("",)}:
            modules.setdefault(module, Counter())[layer.writes or "-"] += 1
    shown = sorted(modules.items(), key=lambda item: -item[1].total())
    yield Table(
        "layers by PyTorch module",
        ("module", "layers", "written in"),
        tuple(
            (name, str(types.total()), ", ".join(f"{count} {dtype}" for dtype, count in types.most_common()))
            for name, types in shown
        ),
    )


def _graph(path: Path) -> Description:
    try:
        import onnx
    except ImportError:
        raise MissingDependency("reading a graph needs onnx", hint="pip install 'trtdiff[compile]'") from None
    try:
        model = onnx.load(path, load_external_data=False)
    except Exception as error:  # noqa: BLE001 - protobuf raises its own kinds
        raise ArtefactError(f"{path.name} is not a readable ONNX file: {error}", where=str(path)) from None
    graph = model.graph
    modules = Counter(_module(node) for node in graph.node)
    operators = Counter(node.op_type for node in graph.node)
    external = {
        entry.value for tensor in graph.initializer for entry in tensor.external_data if entry.key == "location"
    }
    types = Counter(onnx.TensorProto.DataType.Name(tensor.data_type).lower() for tensor in graph.initializer)
    parameters = sum(_product(tensor.dims) for tensor in graph.initializer)
    facts = {
        "size": _size(path.stat().st_size),
        "opset": ", ".join(f"{item.domain or 'ai.onnx'} {item.version}" for item in model.opset_import),
        "made by": f"{model.producer_name} {model.producer_version}".strip(),
        "nodes": len(graph.node),
        "parameters": f"{parameters / 1e6:.1f} M in {len(graph.initializer)} tensors",
        "stored as": ", ".join(f"{count} {name}" for name, count in types.most_common()),
        "weights in": sorted(external),
    }
    inputs = tuple((_value(left), _value(right)) for left, right in _zip(graph.input, graph.output))
    tables = (
        Table("bindings", ("inputs", "outputs"), inputs),
        Table("operators", ("operator", "nodes"), tuple((name, str(n)) for name, n in operators.most_common(15))),
        Table("PyTorch modules", ("module", "nodes"), tuple((name, str(n)) for name, n in modules.most_common(15))),
    )
    return Description("ONNX graph", str(path), facts, tables)


def _bytes_of(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError as error:
        raise ArtefactError(
            f"{path.name} cannot be read: {error.strerror}", where=str(path), hint="export again"
        ) from None


def _tensors(path: Path) -> Description:
    """Describe a safetensors file: sampler tables where it says so, a checkpoint that is whole, else weights."""
    from trtdiff.export.safetensors_index import read_index
    from trtdiff.single_file.kinds import is_whole, looks_like

    if path.name == SAMPLERS_FILE:
        return _samplers(path)
    tensors = read_index(path)
    if is_whole(tensors):
        return _checkpoint(path)
    counts = Counter(ref.dtype for ref in tensors.values())
    seems = looks_like(tensors)
    facts = {
        "size": _size(path.stat().st_size),
        **({"looks like": seems[0]} if seems else {}),
        "parameters": f"{sum(_product(ref.shape) for ref in tensors.values()) / 1e6:.1f} M in {len(tensors)} tensors",
        "stored as": ", ".join(f"{count} {dtype}" for dtype, count in counts.most_common()),
    }
    largest = sorted(tensors.items(), key=lambda item: item[1].nbytes, reverse=True)[:15]
    rows = tuple((name, ref.dtype, "x".join(map(str, ref.shape)), _size(ref.nbytes)) for name, ref in largest)
    return Description(
        "weights", str(path), facts, (Table("largest tensors", ("tensor", "type", "shape", "size"), rows),)
    )


def _samplers(path: Path) -> Description:
    from trtdiff.sampler_book import SamplerBook

    book = SamplerBook.open(path)
    rows = tuple(
        (info.name, info.class_name, str(info.window), str(len(book.steps(name))))
        for name, info in book.samplers.items()
    )
    table = Table("schedulers", ("name", "class", "window", "step counts"), rows)
    return Description("sampler tables", str(path), {"size": _size(path.stat().st_size)}, (table,))


def _picture(path: Path) -> Description:
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(path) as image:
            text, size = dict(getattr(image, "text", {})), image.size
    except (UnidentifiedImageError, OSError) as error:
        raise ArtefactError(f"{path.name} is not a readable picture: {error}", where=str(path)) from None
    facts: dict[str, Any] = {"pixels": f"{size[0]}x{size[1]}"}
    own = text.get("trtdiff")
    if own is not None:
        try:
            parameters = json.loads(own, parse_constant=_no_number)
            facts |= {str(name): value for name, value in parameters.items()}
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            raise ArtefactError(
                f"the picture's parameters are damaged: {error}", where=f"{path}: text chunk 'trtdiff'",
                hint="its receipt, the JSON file beside it, holds them too"
            ) from None  # fmt: skip
    elif text:
        facts |= text
    else:
        facts["parameters"] = "none: not made by trtdiff, or stripped"
    return Description("picture", str(path), facts)


def _no_number(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")


def _receipt(path: Path) -> Description:
    from trtdiff.receipt import Receipt

    receipt = Receipt.read(path)
    use = receipt.scheduler
    stages = tuple(
        (name, str(t.count), f"{t.median * 1e3:.2f} ms", f"{t.p95 * 1e3:.2f} ms", f"{t.total:.3f} s")
        for name, t in receipt.stages.items()
    )
    pictures = tuple((str(p.seed), p.prompt, p.sha256[:12]) for p in receipt.pictures)
    facts = {
        "created": receipt.created,
        "bundle": f"{receipt.bundle} ({receipt.bundle_digest[:12]})",
        "checkpoint": _origin(receipt.checkpoint),
        "weights": receipt.dtype,
        "precision": receipt.precision,
        "backend": f"{receipt.backend} {receipt.backend_version} on {receipt.device}",
        "scheduler": f"{use.name} ({use.class_name}), {use.steps} steps, {use.calls} model calls",
        "guidance": receipt.guidance,
        "size": f"{receipt.width}x{receipt.height}",
        "seconds": f"{receipt.seconds:.3f}" + (", first run" if receipt.first_run else ""),
        "peak memory": _size(receipt.peak_memory),
        "warnings": list(receipt.warnings),
    }
    tables = (
        Table("stages", ("stage", "runs", "median", "p95", "total"), stages),
        Table("pictures", ("seed", "prompt", "sha256"), pictures),
    )
    return Description("receipt", str(path), facts, tables)


def _is_receipt(path: Path) -> bool:
    return _suffix(".json")(path) and b'"bundle_digest"' in path.read_bytes()[:4096]


def _is_cache(path: Path) -> bool:
    from trtdiff.describe_cache import is_cache

    return is_cache(path)


def _cache(path: Path) -> Description:
    from trtdiff.describe_cache import describe_cache

    return describe_cache(path)


KINDS: tuple[tuple[Callable[[Path], bool], Callable[[Path], Description]], ...] = (
    (_has(BUNDLE_FILE), _bundle),
    (_has(EXPORT_FILE), _export),
    (_has("model_index.json"), _checkpoint),
    (_has(MANIFEST_FILE), _engine),
    (_suffix(".onnx"), _graph),
    (_suffix(".safetensors"), _tensors),
    (_suffix(".png"), _picture),
    (_is_receipt, _receipt),
    (_is_cache, _cache),
)
"""Who recognises a path, and who describes it; the first that does."""


def _origin(origin: Any) -> str:
    revision = f" at {origin.revision}" if origin.revision else ""
    return f"{origin.name}{revision} ({origin.pipeline}, {origin.digest[:12]})"


def _module(node: Any) -> str:
    """Give the first two parts of the PyTorch module path that a node came from."""
    path = next((entry.value for entry in node.metadata_props if entry.key == "module"), "")
    return ".".join(path.split(".")[:2]) or "(none)"


def _value(value: Any) -> str:
    if value is None:
        return ""
    import onnx

    tensor = value.type.tensor_type
    dims = ", ".join(dim.dim_param or str(dim.dim_value) for dim in tensor.shape.dim)
    return f"{value.name}: {onnx.TensorProto.DataType.Name(tensor.elem_type).lower()}[{dims}]"


def _zip(left: Iterable[Any], right: Iterable[Any]) -> Iterable[tuple[Any, Any]]:
    from itertools import zip_longest

    return zip_longest(left, right)


def _pairs(left: Iterable[Any], right: Iterable[Any]) -> list[tuple[str, str]]:
    """Put inputs beside outputs, as words."""
    return [("" if a is None else str(a), "" if b is None else str(b)) for a, b in _zip(left, right)]


def _product(dims: Iterable[int]) -> int:
    product = 1
    for dim in dims:
        product *= dim
    return product
