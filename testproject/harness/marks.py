"""Marks: files that processes leave before they are killed, so that counting files counts the kills."""

import os
from pathlib import Path


class Marks:
    """A directory of marks, shared by all processes."""

    def __init__(self, directory: Path | str) -> None:
        self.directory = Path(directory)

    def leave(self, name: str) -> bool:
        """Create a mark. Returns False if it already existed."""
        try:
            (self.directory / name).touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

    def exists(self, name: str) -> bool:
        return (self.directory / name).exists()

    def found(self, pattern: str) -> list[Path]:
        return sorted(self.directory.glob(pattern))

    def count(self, pattern: str) -> int:
        return len(self.found(pattern))

    def note(self, name: str, word: str) -> None:
        """Append a line to a file. Many processes may append at the same time."""
        descriptor = os.open(self.directory / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            os.write(descriptor, f"{word}\n".encode())  # writing a short line is atomic
        finally:
            os.close(descriptor)

    def notes(self, name: str) -> list[str]:
        """The non-empty lines of a file."""
        path = self.directory / name
        return [line for line in path.read_text().splitlines() if line] if path.exists() else []
