"""Profiles by name and by numbers."""

import pytest

from trtdiff.errors import UsageError
from trtdiff.profiles import resolve
from trtdiff.types import ShapeProfile

OWN = ShapeProfile.parse("batch=1:1:4,height=256:512:1024,width=256:512:1024")


@pytest.mark.parametrize(
    ("text", "gives"),
    [
        ("", "batch=1:1:4,height=256:512:1024,width=256:512:1024"),
        ("default", "batch=1:1:4,height=256:512:1024,width=256:512:1024"),
        ("native", "batch=1:1:4,height=512,width=512"),
        ("latency", "batch=1,height=512,width=512"),
        ("throughput", "batch=1:8:16,height=512,width=512"),
        ("batch=2", "batch=2,height=256:512:1024,width=256:512:1024"),
        (" native , batch=1:2:8", "batch=1:2:8,height=512,width=512"),
    ],
)
def test_names_and_ranges(text, gives):
    assert str(resolve(text, OWN)) == gives


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("fast", "no profile is called 'fast'"),
        ("batch=1,native", "'native' is not a profile entry"),
        ("native,depth=3", "no dimension is called depth"),
        ("batch=4:1:8", "min ≤ opt ≤ max"),
    ],
)
def test_what_cannot_be_meant(text, says):
    with pytest.raises(UsageError, match=says):
        resolve(text, OWN)
