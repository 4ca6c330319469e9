"""Checkpoints whose weights are stored in 8 or 4 bits by another library are refused: their numbers are no weights.

They are integers, to be multiplied with scales that lie beside them (bitsandbytes, GPTQ, quanto, torchao). Read as they
are, every layer computes nonsense, and PyTorch computes the same nonsense from them, so that no comparison shows it.
"""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from trtdiff.errors import CheckpointError
from trtdiff.export.renames import stored_name
from trtdiff.export.safetensors_index import TensorRef
from trtdiff.families.base import ComponentSpec, Config
from trtdiff.types import names

if TYPE_CHECKING:
    import onnx_ir as ir

_HINT = "get the checkpoint in 16 or 32 bits; trtdiff makes 8 bits of it itself (--precision int8, fp8)"


def refuse_quantized(configs: Mapping[str, Config], specs: Iterable[ComponentSpec]) -> None:
    """Raise CheckpointError where a component's config says that its weights are quantized."""
    for folder in dict.fromkeys(spec.folder for spec in specs):
        found = configs.get(folder, {}).get("quantization_config")
        if found:
            method = found.get("quant_method", "some method") if isinstance(found, Mapping) else found
            raise CheckpointError(f"the weights of {folder} are quantized ({method})",
                                  where=f"{folder}/config.json: quantization_config", hint=_HINT)  # fmt: skip


def refuse_integers(model: "ir.Model", tensors: Mapping[str, TensorRef]) -> None:
    """Raise CheckpointError where a graph computes with floats and integers are stored."""
    wrong = []
    for name, value in model.graph.initializers.items():
        stored = stored_name(name, tensors)
        floats = value.dtype is not None and value.dtype.is_floating_point()
        if value.const_value is None and stored is not None and floats and "float" not in tensors[stored].dtype:
            wrong.append(stored)
    if wrong:
        ref = tensors[wrong[0]]
        raise CheckpointError(f"{len(wrong)} weights are stored as {ref.dtype}, not as floats: {names(wrong, 2)}",
                              where=str(ref.file), hint=_HINT)  # fmt: skip
