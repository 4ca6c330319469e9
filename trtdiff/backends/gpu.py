"""The NVIDIA GPUs that this process may use, asked of the driver itself: no other library, and milliseconds.

The driver's own order of devices is CUDA's, `CUDA_VISIBLE_DEVICES` included, which nvidia-smi's is not.
"""

import ctypes
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from trtdiff.errors import MissingDependency

_DRIVER = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
_MAJOR, _MINOR = 75, 76
"""CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR of the driver's interface."""
_NAME_BYTES = 256
_NO_DEVICE = 100
FLOAT8_FROM = 89
"""Compute capability, times ten, of the first GPUs that multiply float8: Ada, Hopper and later.
https://docs.nvidia.com/deeplearning/tensorrt-rtx/latest/inference-library/work-quantized-types.html"""
_HINT = "build with --target rtx:sm89 here (or for another GPU by its number), or run this on the machine with the GPU"


@dataclass(frozen=True)
class Gpu:
    """A GPU."""

    name: str
    number: int
    """Its compute capability times ten: 89."""

    @property
    def capability(self) -> str:
        """Its compute capability as targets name it: `sm89`."""
        return f"sm{self.number}"

    @property
    def words(self) -> str:
        """Name and compute capability."""
        return f"{self.name} ({self.capability})"


def this_gpu(load: Callable[[str], Any] = ctypes.CDLL) -> Gpu:
    """Ask the driver for the first GPU, which this process would use. Raises MissingDependency as `gpus` does."""
    return gpus(load)[0]


def gpus(load: Callable[[str], Any] = ctypes.CDLL) -> tuple[Gpu, ...]:
    """Ask the driver for every GPU, at least one. Raises MissingDependency for no driver, no GPU, or no answer."""
    try:
        driver = load(_DRIVER)
    except OSError:
        raise MissingDependency(f"there is no NVIDIA driver here ({_DRIVER})", hint=_HINT) from None
    count = ctypes.c_int()
    status = driver.cuInit(0)
    if status != _NO_DEVICE:
        _require(status)
        _require(driver.cuDeviceGetCount(ctypes.byref(count)))
    if not count.value:
        raise MissingDependency("there is an NVIDIA driver and no GPU that it may use", where="CUDA_VISIBLE_DEVICES",
                                hint=_HINT)  # fmt: skip
    return tuple(_gpu(driver, index) for index in range(count.value))


def without_float8(capabilities: Iterable[str]) -> str:
    """Say which of these compute capabilities (`sm86`) have no float8; empty where all have."""
    lacking = [item for item in capabilities if int(item[2:]) < FLOAT8_FROM]
    return f"{', '.join(lacking)} {'have' if len(lacking) > 1 else 'has'} no float8" if lacking else ""


def _gpu(driver: Any, index: int) -> Gpu:
    device, name, numbers = ctypes.c_int(), ctypes.create_string_buffer(_NAME_BYTES), [ctypes.c_int(), ctypes.c_int()]
    _require(driver.cuDeviceGet(ctypes.byref(device), index))
    _require(driver.cuDeviceGetName(name, _NAME_BYTES, device))
    for number, attribute in zip(numbers, (_MAJOR, _MINOR), strict=True):
        _require(driver.cuDeviceGetAttribute(ctypes.byref(number), attribute, device))
    return Gpu(name.value.decode(errors="replace"), 10 * numbers[0].value + numbers[1].value)


def _require(status: int) -> None:
    if status:
        raise MissingDependency(f"the NVIDIA driver does not answer (error {status})", hint=_HINT)
