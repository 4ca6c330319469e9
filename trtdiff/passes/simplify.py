"""The passes that every exported graph goes through, in order, until none finds anything more."""

from typing import TYPE_CHECKING

from trtdiff.passes.base import Pass, run_passes
from trtdiff.passes.drop_neutral import drop_neutral
from trtdiff.passes.drop_noops import drop_noops
from trtdiff.passes.fold_constants import fold_constants
from trtdiff.passes.gather_constants import gather_constants
from trtdiff.passes.merge_equal import merge_equal
from trtdiff.passes.narrow_float64 import narrow_float64
from trtdiff.passes.remove_unused import remove_unused
from trtdiff.passes.straighten_shapes import straighten_shapes

if TYPE_CHECKING:
    import onnx_ir as ir

SIMPLIFY: tuple[Pass, ...] = (
    gather_constants,
    fold_constants,
    narrow_float64,
    straighten_shapes,
    drop_noops,
    drop_neutral,
    merge_equal,
    remove_unused,
)


def simplify(model: "ir.Model") -> dict[str, int]:
    """Give the changes that each pass made."""
    return run_passes(model, SIMPLIFY)
