"""What a range scan found: how large the values of every component's canonical graph get, and how small they are.

The file `ranges.json` of a store entry. Values have the names that they have in the exported graph.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from trtdiff.records import read_record

RANGES_SCHEMA = 1
RANGES_FILE = "ranges.json"


@dataclass(frozen=True)
class ValueRange:
    """One value, over everything that was seen of it."""

    amax: float
    """Largest magnitude."""
    rms: float
    """Root of the mean square."""


@dataclass(frozen=True)
class Ranges:
    """Of a whole checkpoint."""

    schema: int
    components: Mapping[str, Mapping[str, ValueRange]]
    """Component → value → its range."""
    calls: Mapping[str, int]
    """Component → executions that were seen."""
    scanned: str
    """In words: prompts, steps, seeds, size."""


def read_ranges(path: Path) -> Ranges:
    """Read `ranges.json`. Raises ArtefactError."""
    return read_record(path, Ranges, schema=RANGES_SCHEMA)
