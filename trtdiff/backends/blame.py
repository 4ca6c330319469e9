"""Where a result that is not finite comes from, in words."""

from collections.abc import Mapping

from trtdiff.backends.base import LooksInside, Session
from trtdiff.errors import MissingDependency
from trtdiff.types import Array


class Noting:
    """A session that notes what it was last run with, so that it can be asked afterwards."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._feeds: Mapping[str, Array] | None = None

    def run(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """Execute once."""
        self._feeds = feeds
        return self._session.run(feeds)

    def first_non_finite(self) -> str:
        """Say in which layer the first value that is not finite came up; empty where it was not run."""
        return "" if self._feeds is None else first_non_finite(self._session, self._feeds)


def first_non_finite(session: Session, feeds: Mapping[str, Array]) -> str:
    """Say in which layer the first value that is not finite comes up with these feeds, or why that is not known."""
    if not isinstance(session, LooksInside):
        return "this backend cannot say in which layer first"
    try:
        place = session.first_non_finite(feeds)
    except MissingDependency as error:
        return f"in which layer first is not known: {error.message} ({error.hint})"
    except Exception as error:  # noqa: BLE001 - it explains another error, and must not take its place
        return f"in which layer first is not known: looking for it failed ({error})"
    return "in no layer when it is run again" if place is None else f"first in {place}"
