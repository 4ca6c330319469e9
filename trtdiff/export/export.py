"""`export_checkpoint`: a checkpoint becomes a folder of graphs that refer to its weights.

    for each folder of the checkpoint:  trace its components (or know them) → canonical graphs
                                        → place the weights they need, once
                                        → write the graphs, verify the files → compare with PyTorch
    tokenizers, configs, manifest → the folder takes its place

`export_components` does the middle part for components that share a folder.
"""

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from trtdiff import __version__
from trtdiff.checkpoint import Checkpoint
from trtdiff.digest import file_digest
from trtdiff.errors import CheckpointError, SamplerError, UsageError
from trtdiff.export.folder import current, export_code, library_versions, require_replaceable
from trtdiff.export.manifest import (
    EXPORT_FILE,
    EXPORT_SCHEMA,
    CheckpointOrigin,
    ExportedComponent,
    ExportManifest,
)
from trtdiff.export.quantized import refuse_quantized
from trtdiff.export.safetensors_index import TensorRef
from trtdiff.export.weights import place_weights, placement_bytes
from trtdiff.families import family_of_pipeline
from trtdiff.families.base import ComponentSpec, Config, ModelFamily, TokenFacts
from trtdiff.records import write_record
from trtdiff.types import names
from trtdiff.whole import locked, replaced_folder

if TYPE_CHECKING:
    import onnx_ir as ir

    from trtdiff.export.check import CheckPoint


class Reporter(Protocol):
    """Hears how far the export is."""

    def stage(self, text: str, total: int | None = None) -> None:
        """Say that a stage begins, of so many bytes if it has any."""

    def advance(self, nbytes: int) -> None:
        """Say that so many more bytes of the stage are done."""

    def note(self, text: str) -> None:
        """Say something that stays: another process is waited for."""


class Silence:
    """A reporter for programs."""

    def stage(self, text: str, total: int | None = None) -> None:
        """Say nothing."""

    def advance(self, nbytes: int) -> None:
        """Say nothing."""

    def note(self, text: str) -> None:
        """Say nothing."""


@dataclass(frozen=True)
class ComponentReport:
    """What exporting one component took and gave, for people."""

    nodes: int
    graph_bytes: int
    weight_bytes: int
    seconds: float
    checks: "tuple[CheckPoint, ...]"
    traced: bool = True
    """False where its graph was known from another checkpoint of the same architecture."""


@dataclass(frozen=True)
class Export:
    """An export folder, and how it came to be."""

    folder: Path
    manifest: ExportManifest
    reports: Mapping[str, ComponentReport] = field(default_factory=dict)
    up_to_date: bool = False
    """Whether the folder was there already, and nothing had to be done."""
    reason: str = ""
    """Why an export that was there was made again."""


def export_checkpoint(
    checkpoint: Checkpoint,
    out: Path,
    *,
    dtype: str = "stored",
    components: Sequence[str] | None = None,
    check: bool = True,
    force: bool = False,
    reporter: Reporter | None = None,
) -> Export:
    """Export a checkpoint into `out`, which appears whole or stays as it was.

    `dtype` is the type in which weights are stored; graphs compute in float32 whatever it is. `components` leaves
    others out. An export that is there and is just what would be made is given back; `force` makes it anew. Graphs that
    were traced before, for another checkpoint of the same configs, are taken from the cache unless `force`.

    Raises UsageError for components that there are not and a folder that is not an export; CheckpointError for weights
    that do not fit; ExportError for what cannot be traced or breaks its contract; StorageError for a full disk.
    """
    reporter = reporter or Silence()
    family = family_of_pipeline(checkpoint.pipeline, where=checkpoint.parts.where)
    specs = _chosen(_described(family, checkpoint), components)
    require_replaceable(out)
    reporter.stage("reading the checkpoint's digest")
    origin = checkpoint.origin(progress=reporter.advance, fresh=force)
    wanted = tuple(spec.name for spec in specs)
    code = export_code(family)

    def found() -> tuple[ExportManifest | None, str]:
        return current(out, origin, dtype=dtype, components=wanted, code=code, checked=check)

    there, reason = found()
    if there is None or force:
        with locked(out, reporter.note):
            there, reason = found()  # another process may have made it while we waited
            if there is None or force:
                return _export(
                    checkpoint, out, family, specs,
                    origin=origin, reason=reason, dtype=dtype, check=check, fresh=force, code=code, reporter=reporter,
                )  # fmt: skip
    return Export(out, there, up_to_date=True)


def _export(
    checkpoint: Checkpoint,
    out: Path,
    family: ModelFamily,
    specs: Sequence[ComponentSpec],
    *,
    origin: CheckpointOrigin,
    reason: str,
    dtype: str,
    check: bool,
    fresh: bool,
    code: str,
    reporter: Reporter,
) -> Export:
    """Make it, and put it into its place."""
    _check_scheduler(checkpoint, family)
    refuse_quantized(checkpoint.configs, specs)
    facts = family.facts(checkpoint.configs)
    texts = {f"tokenizers/{name}.json": _tokenizer(checkpoint, name, tokens) for name, tokens in facts.tokens.items()}
    exported: dict[str, ExportedComponent] = {}
    reports: dict[str, ComponentReport] = {}
    with replaced_folder(out) as folder:
        for group in _by_folder(specs):
            source = group[0].folder
            for spec, component, report in export_components(
                group, checkpoint.configs[source], checkpoint.tensors(source), folder,
                dtype=dtype, check=check, code=code, fresh=fresh, reporter=reporter,
            ):  # fmt: skip
                exported[spec.name], reports[spec.name] = component, report
        tokenizers = dict(zip(facts.tokens, texts, strict=True))
        for file, text in texts.items():
            (folder / file).parent.mkdir(exist_ok=True)
            (folder / file).write_bytes(text)
        manifest = ExportManifest(
            schema=EXPORT_SCHEMA,
            trtdiff=__version__,
            name=out.name,
            family=family.name,
            checkpoint=origin,
            facts=facts,
            components=tuple(exported[spec.name] for spec in specs),
            tokenizers=tokenizers,
            tokenizer_sha256={name: file_digest(folder / file) for name, file in tokenizers.items()},
            scheduler=checkpoint.configs.get("scheduler", {}),
            configs=dict(checkpoint.configs),
            checks={name: [asdict(point) for point in report.checks] for name, report in reports.items() if check},
            versions=library_versions(),
            dtype=dtype,
            code=code,
        )
        write_record(folder / EXPORT_FILE, manifest)
    return Export(out, manifest, reports, reason=reason)


def export_components(
    specs: Sequence[ComponentSpec],
    config: Config,
    tensors: Mapping[str, TensorRef],
    out: Path,
    *,
    dtype: str = "stored",
    check: bool = True,
    code: str = "",
    fresh: bool = False,
    reporter: Reporter | None = None,
) -> Iterable[tuple[ComponentSpec, ExportedComponent, ComponentReport]]:
    """Export components that share one folder's config and weights into `out`; one placement serves them all.

    With the digest of the code that makes graphs as `code`, graphs are taken from the cache of what was traced before;
    `fresh` traces them anew.
    """
    from trtdiff.export.check import check_graph, memory_for_check, require_onnxruntime
    from trtdiff.export.graph import needed_weights
    from trtdiff.export.quantized import refuse_integers
    from trtdiff.export.trace_cache import traced_before

    reporter = reporter or Silence()
    if check:
        require_onnxruntime()
    models: list[ir.Model] = []
    known: list[bool] = []
    seconds: list[float] = []
    for spec in specs:
        began = time.monotonic()
        make = partial(_traced, spec, config, reporter)
        model, found = traced_before(spec, config, code, make, fresh=fresh) if code else (make(), False)
        models.append(model)
        known.append(found)
        seconds.append(time.monotonic() - began)
    needs = [needed_weights(model) for model in models]
    for model in models:
        refuse_integers(model, tensors)
    union = {name: shape for need in needs for name, shape in need.items()}
    if check:
        _require_memory(specs, needs)
    stem = specs[0].folder
    reporter.stage(f"{stem}: placing weights", placement_bytes(tensors, union, dtype))
    places = place_weights(tensors, union, out, stem, dtype=dtype, progress=reporter.advance)
    for spec, need, found, spent in zip(specs, needs, known, seconds, strict=True):
        began = time.monotonic()
        used = {name: places[name] for name in need}
        component, nodes = _write(models.pop(0), spec, used, out, reporter)
        checks: tuple[CheckPoint, ...] = ()
        if check:
            memory = memory_for_check(_elements(need)) / 1e9
            reporter.stage(f"{spec.name}: comparing with PyTorch, {memory:.1f} GB")
            checks = check_graph(out / component.graph, spec, config, used)
        report = ComponentReport(
            nodes,
            graph_bytes=(out / component.graph).stat().st_size,
            weight_bytes=sum(ref.nbytes for ref in used.values()),
            seconds=spent + time.monotonic() - began,
            checks=checks,
            traced=not found,
        )
        yield spec, component, report


def _traced(spec: ComponentSpec, config: Config, reporter: Reporter) -> "ir.Model":
    from trtdiff.export.graph import canonical_graph
    from trtdiff.export.trace import trace

    reporter.stage(f"{spec.name}: tracing")
    model = trace(spec, config)
    canonical_graph(model, spec)
    return model


def _write(
    model: "ir.Model", spec: ComponentSpec, places: Mapping[str, TensorRef], out: Path, reporter: Reporter
) -> tuple[ExportedComponent, int]:
    from trtdiff.export.check import open_graph
    from trtdiff.export.contract import verify_graph
    from trtdiff.export.graph import refer_to_weights, write_graph

    reporter.stage(f"{spec.name}: writing and verifying the graph")
    refer_to_weights(model, places, out)
    path = out / f"{spec.name}.onnx"
    write_graph(model, path)
    verify_graph(path, spec)
    if find_spec("onnxruntime") is not None:
        open_graph(path)
    files = sorted({ref.file for ref in places.values()})
    component = ExportedComponent(
        name=spec.name,
        folder=spec.folder,
        graph=path.name,
        graph_sha256=file_digest(path),
        weights={file.relative_to(out).as_posix(): file_digest(file) for file in files},
        inputs=spec.inputs,
        outputs=spec.outputs,
    )
    return component, len(model.graph)


def _require_memory(specs: Sequence[ComponentSpec], needs: Sequence[Mapping[str, tuple[int, ...]]]) -> None:
    from trtdiff.export.check import require_memory

    require_memory({spec.name: _elements(need) for spec, need in zip(specs, needs, strict=True)})


def _elements(need: Mapping[str, tuple[int, ...]]) -> int:
    return sum(math.prod(shape) for shape in need.values())


def _described(family: ModelFamily, checkpoint: Checkpoint) -> tuple[ComponentSpec, ...]:
    where, hint = str(checkpoint.path), f"a {family.name} checkpoint is expected"
    try:
        return family.components(checkpoint.configs)
    except KeyError as error:
        raise CheckpointError(f"the checkpoint's configs lack {error}", where=where, hint=hint) from None
    except (TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(
            f"a config of the checkpoint has a value of the wrong kind: {error}", where=where, hint=hint
        ) from None


def _check_scheduler(checkpoint: Checkpoint, family: ModelFamily) -> None:
    """Refuse now what no build could make a table of."""
    from trtdiff.export.schedulers import check_default

    try:
        check_default(checkpoint.configs.get("scheduler", {}), family.schedule_call(checkpoint.pipeline, 0))
    except SamplerError as error:
        where = f"{checkpoint.path}/scheduler/scheduler_config.json: _class_name"
        raise CheckpointError(error.message, where=where, hint=error.hint) from None


def _tokenizer(checkpoint: Checkpoint, name: str, tokens: TokenFacts) -> bytes:
    """Give a tokenizer's content; one that cannot make the rows that its text encoder takes is refused."""
    from trtdiff.tokens import Tokenizer

    content, where = checkpoint.tokenizer_json(name), f"{checkpoint.parts.tokenizer(name)}"
    encoder = name.replace("tokenizer", "text_encoder")
    words, hint = checkpoint.configs[encoder].get("vocab_size"), f"use the tokenizer that {encoder} was trained with"
    try:
        opened = Tokenizer.of(content, tokens)
        number, token = opened.largest
        if not opened.end:
            raise ValueError("it puts no end token behind a prompt")  # noqa: TRY301 - the same words for all of them
    except ValueError as error:
        raise CheckpointError(f"cannot use {name}: {error}", where=where, hint=hint) from None
    if isinstance(words, int) and number >= words:
        raise CheckpointError(f"{name} has an id {number} ({token!r}), and {encoder} {words} words: 0 to {words - 1}",
                              where=where, hint=hint)  # fmt: skip
    return content


def _chosen(specs: tuple[ComponentSpec, ...], components: Sequence[str] | None) -> tuple[ComponentSpec, ...]:
    if components is None:
        return specs
    known = [spec.name for spec in specs]
    if not components:
        raise UsageError(
            "no component is asked for", where="--components", hint=f"this checkpoint has {', '.join(known)}"
        )
    if unknown := [name for name in components if name not in known]:
        raise UsageError(f"no component is called {names(unknown)}", where="--components",
                         hint=f"this checkpoint has {', '.join(known)}")  # fmt: skip
    return tuple(spec for spec in specs if spec.name in components)


def _by_folder(specs: Iterable[ComponentSpec]) -> list[list[ComponentSpec]]:
    groups: dict[str, list[ComponentSpec]] = {}
    for spec in specs:
        groups.setdefault(spec.folder, []).append(spec)
    return list(groups.values())
