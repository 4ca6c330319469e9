"""What a comparison will take, before it is run: peak activation memory and multiply-adds of a module at a shape.

The module is executed on fake tensors, which have shapes and no data, while every operator's outputs are counted as
long as they live. That is PyTorch's own peak; a compiled engine that does not fuse attention also holds the scores,
whose largest matrix is counted apart.
"""

import weakref
from dataclasses import dataclass
from typing import Any

from trtdiff.families.base import ComponentSpec, Config


@dataclass(frozen=True)
class Cost:
    """Of one call of one component."""

    activation_bytes: int
    """Largest sum of live intermediate tensors, float32."""
    attention_bytes: int
    """The largest matrix of attention scores, for engines that hold it."""
    flops: int
    """Two for every multiply-add of convolutions, matrix products and attention."""


def cost(spec: ComponentSpec, config: Config, sizes: dict[str, int]) -> Cost:
    """Count one call of the component at these sizes, without memory for it."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils.flop_counter import FlopCounterMode

    class Live(TorchDispatchMode):  # type: ignore[no-untyped-call]
        """Adds up the bytes of storages between their birth and their end."""

        def __init__(self, weights: set[int]) -> None:
            super().__init__()  # type: ignore[no-untyped-call]
            self.now = self.peak = self.scores = 0
            self.seen = weights

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if "scaled_dot_product" in str(func):
                query, key = args[0], args[1]
                self.scores = max(self.scores, query.numel() // query.shape[-1] * key.shape[-2] * 4)
            result = func(*args, **(kwargs or {}))
            for tensor in result if isinstance(result, tuple | list) else (result,):
                if isinstance(tensor, torch.Tensor):
                    self._born(tensor)
            return result

        def _born(self, tensor: torch.Tensor) -> None:
            storage = tensor.untyped_storage()
            identity = _identity(storage)
            if identity in self.seen:
                return
            self.seen.add(identity)
            size = storage.nbytes()
            self.now += size
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._died, identity, size)

        def _died(self, identity: int, size: int) -> None:
            self.now -= size
            self.seen.discard(identity)

    with FakeTensorMode(), torch.no_grad():
        module = spec.build(config)
        live = Live({_identity(tensor.untyped_storage()) for tensor in module.state_dict().values()})
        inputs = [torch.zeros(item.shape(sizes), dtype=getattr(torch, item.dtype)) for item in spec.inputs]
        with FlopCounterMode(display=False) as flops, live:
            module(*inputs)
    return Cost(live.peak, live.scores, flops.get_total_flops())


def flops_per_second() -> float:
    """Measure this machine's rate at a float32 matrix product, in a fraction of a second."""
    import time

    import torch

    a = torch.rand(1024, 1024)
    a @ a
    best = min(_timed(lambda: a @ a, time.perf_counter) for _ in range(3))
    return 2 * 1024**3 / best


def _timed(work: Any, clock: Any) -> float:
    began = clock()
    work()
    return float(clock() - began)


def _identity(storage: Any) -> int:
    """Tell storages apart: Python wrappers of one storage come and go, its C++ object stays."""
    return int(storage._cdata)  # noqa: SLF001 - torch has no public name for it
