"""trtdiff: compile diffusion checkpoints into engines, run them without PyTorch, prove that the pictures are the same.

    import trtdiff

    with trtdiff.load("engines/digits") as pipeline:
        result = pipeline("a handwritten seven, red ink on a yellow page", steps=20, guidance=4.0, seed=7)
        result.images[0].save("seven.png")

Importing this package loads neither torch, diffusers, transformers nor onnx; `load` needs only a backend.
"""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["Pipeline", "TrtdiffError", "__version__", "load"]

if TYPE_CHECKING:
    from trtdiff.errors import TrtdiffError
    from trtdiff.pipeline import Pipeline, load


def __getattr__(name: str) -> Any:
    """Load the runtime on first use, so that `import trtdiff` costs nothing."""
    if name == "TrtdiffError":
        from trtdiff.errors import TrtdiffError

        return TrtdiffError
    if name in {"Pipeline", "load"}:
        from trtdiff import pipeline

        return getattr(pipeline, name)
    raise AttributeError(f"module 'trtdiff' has no attribute {name!r}")
