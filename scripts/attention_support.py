"""Which attention TensorRT for RTX has fused kernels for, found by building it; needs no GPU.

    python scripts/attention_support.py [--targets portable,sm89] [--sizes 8,16,64]

Builds a network of one `Attention` for each target, type, form and head size (about 30 ms each, 10 minutes for all) and
prints the sizes that build, those that build only when the operator may be decomposed, and the reason where none does.
Copy what differs into `trtdiff/backends/attention.py`.
"""

import argparse
import itertools
from typing import Any

from trtdiff.backends.attention import mark_decomposable

SIZES = [*range(1, 21), 24, 32, 40, 48, 64, 80, 96, 112, 128, 160, 192, *range(250, 262), 264, 320, 512]
TYPES = ("float16", "bfloat16", "float")
FORMS = ("self", "cross", "self, mask", "cross, mask", "cross, Boolean mask", "self, Boolean mask", "self, causal")


def network_text(dtype: str, form: str, size: int) -> str:
    keys = "T" if "cross" in form else "S"
    mask = f", {'bool' if 'Boolean' in form else dtype}[B, 1, S, {keys}] m" if "mask" in form else ""
    call = f"Attention <is_causal = {int('causal' in form)}> (q, k, v{', m' if mask else ''})"
    shape = f"{dtype}[B, 2, {keys}, {size}]"
    return f"""<ir_version: 11, opset_import: ["": 23]>
        net ({dtype}[B, 2, S, {size}] q, {shape} k, {shape} v{mask}) => ({dtype}[B, 2, S, {size}] y) {{ y = {call} }}"""


def build(trt: Any, target: str, model: bytes, *, decomposable: bool) -> str:
    """Give why it does not build; empty where it does."""
    errors: list[str] = []

    class Logger(trt.ILogger):
        def __init__(self) -> None:
            trt.ILogger.__init__(self)

        def log(self, severity: Any, message: str) -> None:
            if "ERROR" in severity.name:
                errors.append(message)

    builder = trt.Builder(Logger())
    network = builder.create_network(0)
    parser = trt.OnnxParser(network, builder.logger)
    if not parser.parse(model):
        return str(parser.get_error(0).desc())
    if decomposable:
        mark_decomposable(trt, network)
    config = builder.create_builder_config()
    if target != "portable":
        config.num_compute_capabilities = 1
        config.set_compute_capability(getattr(trt.ComputeCapability, target.upper()), 0)
    profile = builder.create_optimization_profile()
    for index in range(network.num_inputs):
        value = network.get_input(index)
        known = [1, *value.shape[1:]]
        profile.set_shape(value.name, *([n if dim < 0 else dim for dim in known] for n in (16, 64, 256)))
    config.add_optimization_profile(profile)
    return "" if builder.build_serialized_network(network, config) else errors[-1]


def spans(sizes: list[int], tried: list[int]) -> str:
    """Write sizes briefly: neighbours among those that were tried as `9…256`."""
    parts: list[list[int]] = []
    for size in sizes:
        if parts and tried.index(size) == tried.index(parts[-1][-1]) + 1:
            parts[-1].append(size)
        else:
            parts.append([size])
    return ", ".join(str(part[0]) if len(part) == 1 else f"{part[0]}…{part[-1]}" for part in parts) or "none"


def main() -> None:
    import onnx
    import tensorrt_rtx as trt

    known = [name.lower() for name in trt.ComputeCapability.__members__ if name.startswith("SM")]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--targets", default=",".join(["portable", *known]))
    parser.add_argument("--sizes", default=",".join(map(str, SIZES)))
    arguments = parser.parse_args()
    sizes = [int(size) for size in arguments.sizes.split(",")]
    print(f"TensorRT for RTX {trt.__version__}")
    for target, dtype, form in itertools.product(arguments.targets.split(","), TYPES, FORMS):
        models = {size: onnx.parser.parse_model(network_text(dtype, form, size)).SerializeToString() for size in sizes}
        refused = {size: build(trt, target, model, decomposable=False) for size, model in models.items()}
        fused = [size for size in sizes if not refused[size]]
        rest = [size for size in sizes if refused[size]]
        parts = [size for size in rest if not build(trt, target, models[size], decomposable=True)]
        neither = [size for size in rest if size not in parts]
        reason = f"; neither {spans(neither, sizes)}: {refused[neither[0]].splitlines()[0][:160]}" if neither else ""
        words = f"fused {spans(fused, sizes)}; in parts {spans(parts, sizes)}{reason}"
        print(f"{target:9} {dtype:9} {form:20} {words}", flush=True)


if __name__ == "__main__":
    main()
