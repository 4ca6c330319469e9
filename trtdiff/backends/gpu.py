"""The NVIDIA GPU that this process would use, asked of the driver itself: no other library, and milliseconds.

The driver's own order of devices is CUDA's, `CUDA_VISIBLE_DEVICES` included, which nvidia-smi's is not.
"""

import ctypes
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from trtdiff.errors import MissingDependency

_DRIVER = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
_MAJOR, _MINOR = 75, 76
"""CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR of the driver's interface."""
_NAME_BYTES = 256
_NO_DEVICE = 100
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
    """Ask the driver for its first GPU. Raises MissingDependency for no driver, no GPU, or one that does not answer."""
    try:
        driver = load(_DRIVER)
    except OSError:
        raise MissingDependency(f"there is no NVIDIA driver here ({_DRIVER})", hint=_HINT) from None
    status = driver.cuInit(0)
    if status == _NO_DEVICE:
        raise MissingDependency("there is an NVIDIA driver and no GPU that it may use", where="CUDA_VISIBLE_DEVICES",
                                hint=_HINT)  # fmt: skip
    device, name, numbers = ctypes.c_int(), ctypes.create_string_buffer(_NAME_BYTES), [ctypes.c_int(), ctypes.c_int()]
    status = status or driver.cuDeviceGet(ctypes.byref(device), 0)
    status = status or driver.cuDeviceGetName(name, _NAME_BYTES, device)
    for number, attribute in zip(numbers, (_MAJOR, _MINOR), strict=True):
        status = status or driver.cuDeviceGetAttribute(ctypes.byref(number), attribute, device)
    if status:
        raise MissingDependency(f"the NVIDIA driver does not answer (error {status})", hint=_HINT)
    return Gpu(name.value.decode(errors="replace"), 10 * numbers[0].value + numbers[1].value)
