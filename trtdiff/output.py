"""Where the pictures of a run go: names, the contact sheet, and the receipt beside them.

    -o out.png, one picture      out.png, out.json
    -o out.png, four pictures    out-0.png … out-3.png, out.json
    -o out.png --grid            the same, and the contact sheet out.png

Files of these names are replaced, each whole or not at all. Pictures are written as soon as they are done, so that what
was finished before an interruption stays.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from trtdiff.errors import UsageError
from trtdiff.execution import Picture
from trtdiff.images import grid, save_png
from trtdiff.receipt import Receipt
from trtdiff.records import whole_file
from trtdiff.request import Request


@dataclass(frozen=True)
class Output:
    """The files of one run."""

    path: Path
    pictures: int
    sheet: bool
    columns: int | None
    """Of the contact sheet; None: nearly square."""

    @classmethod
    def of(cls, path: Path, request: Request, *, sheet: bool) -> "Output":
        """Check, before anything runs, that the files can be written. Raises UsageError, StorageError."""
        if path.suffix.lower() != ".png":
            raise UsageError(
                f"{str(path)!r} does not end in .png", where="-o", hint="pictures are written as PNG files"
            )
        several = len(request.prompts) > 1 and request.count > 1
        made = cls(path, request.pictures, sheet, request.count if several else None)
        try:
            taken = next((file for file in made.files() if file.is_dir()), None)
        except OSError as error:
            raise UsageError(f"{path.name[:40]}… cannot be a file's name: {error.strerror}", where="-o") from None
        if taken is not None:
            raise UsageError(f"{taken} is a folder", where="-o", hint="name another file, for example out.png")
        _check_writable(made.receipt)
        return made

    @property
    def receipt(self) -> Path:
        """Beside the pictures, with their name."""
        return self.path.with_suffix(".json")

    def file(self, index: int) -> Path:
        """Name one picture."""
        if self.pictures == 1 and not self.sheet:
            return self.path
        digits = len(str(self.pictures - 1))
        return self.path.with_stem(f"{self.path.stem}-{index:0{digits}}")

    def files(self) -> list[Path]:
        """Name every file of the run."""
        pictures = [self.file(index) for index in range(self.pictures)]
        return [self.path, *pictures, self.receipt]

    def write(self, picture: Picture) -> Path:
        """Write one picture."""
        picture.save(self.file(picture.index))
        return self.file(picture.index)

    def finish(self, pictures: Sequence[Picture], receipt: Receipt) -> list[Path]:
        """Write the receipt, and the contact sheet where one was asked for."""
        written = []
        if self.sheet:
            shared = {
                key: value for key, value in pictures[0].parameters.items() if key not in {"prompt", "negative", "seed"}
            }
            prompts = " | ".join(dict.fromkeys(picture.facts.prompt for picture in pictures))
            seeds = ", ".join(str(picture.facts.seed) for picture in pictures)
            sheet = grid([picture.image for picture in pictures], self.columns)
            save_png(sheet, self.path, {"prompt": prompts, **shared, "seeds": seeds})
            written.append(self.path)
        files = tuple(self.file(picture.index).name for picture in pictures)
        replace(receipt, files=files).write(self.receipt)
        return [*written, self.receipt]


def _check_writable(path: Path) -> None:
    """Write and remove a file beside `path`, as `whole_file` will. Raises StorageError."""
    try:
        with whole_file(path) as temporary:
            temporary.write_bytes(b"?")
            raise _Enough  # noqa: TRY301 - the exception is the way out of `whole_file` without a file
    except _Enough:
        return


class _Enough(Exception):  # noqa: N818 - not an error
    """Leaves `whole_file` before it renames."""
