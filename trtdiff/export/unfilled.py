"""A component's PyTorch module whose weights have a shape and a type but no bytes.

`torch.empty` makes *fake* tensors while the module is built, so parameters cost nothing, whereas whatever a module
computes for itself (position ids, masks) is computed for real and has its true values. The check fills the weights in
later; the trace never does.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from trtdiff.errors import ExportError
from trtdiff.families.base import ComponentSpec, Config

if TYPE_CHECKING:
    import torch


def build_unfilled(spec: ComponentSpec, config: Config, fake: Any) -> "torch.nn.Module":
    """Build a component's module in inference mode; what its checkpoint stores is fake.

    Raises ExportError where the installed libraries cannot build it from this config.
    """
    import torch
    from torch.overrides import TorchFunctionMode

    class EmptyIsFake(TorchFunctionMode):
        """Parameters are born in `torch.empty`; constants in `arange`, `full`, `tensor`."""

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.empty:
                with fake:
                    return func(*args, **(kwargs or {}))
            return func(*args, **(kwargs or {}))

    try:
        with EmptyIsFake():
            module = spec.build(config).eval()
    except Exception as error:  # whatever a config that fits no module provokes in its constructor
        raise ExportError(
            f"{spec.name} cannot be built: {reason(error)}",
            where=f"{spec.folder}/config.json",
            hint="this config does not fit the installed diffusers and transformers",
        ) from error
    _make_parameters_fake(module, fake)
    return module


def _make_parameters_fake(module: "torch.nn.Module", fake: Any) -> None:
    """Let parameters that were born elsewhere (`torch.zeros`, `torch.randn`) be fake too: their values are stored."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensor

    stored = set(module.state_dict())
    for path, part in module.named_modules():
        prefix = f"{path}." if path else ""
        for name, parameter in list(part.named_parameters(recurse=False)):
            if not isinstance(parameter, FakeTensor):
                part.register_parameter(
                    name, torch.nn.Parameter(fake.from_tensor(parameter.data, static_shapes=True), requires_grad=False)
                )
            else:
                parameter.requires_grad_(False)
        for name, buffer in list(part.named_buffers(recurse=False)):
            if prefix + name in stored and not isinstance(buffer, FakeTensor):
                part.register_buffer(name, fake.from_tensor(buffer, static_shapes=True))
            elif prefix + name not in stored and isinstance(buffer, FakeTensor):
                raise ExportError(
                    f"the values of buffer {prefix + name} are neither stored nor computed", where=path or "the module"
                )


def _named_tensors(module: "torch.nn.Module") -> Iterator[tuple[str, "torch.Tensor"]]:
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


def unfilled_names(module: "torch.nn.Module") -> set[str]:
    """Name the tensors of a module that have no bytes."""
    from torch._subclasses.fake_tensor import FakeTensor

    return {name for name, tensor in _named_tensors(module) if isinstance(tensor, FakeTensor)}


def reason(error: BaseException) -> str:
    """Give the first line of an error's innermost cause."""
    *_, innermost = causes(error)
    lines = [line.strip() for line in str(innermost).splitlines() if line.strip()]
    return lines[0] if lines else type(innermost).__name__


def causes(error: BaseException) -> Iterator[BaseException]:
    """Give an error, what it was raised from, and so on inwards."""
    current: BaseException | None = error
    while current is not None:
        yield current
        current = current.__cause__
