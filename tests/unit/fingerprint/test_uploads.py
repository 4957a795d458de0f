"""An upload's fingerprint is its content's, read where it is kept and left as it was."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
from django.core.files.uploadedfile import InMemoryUploadedFile, TemporaryUploadedFile, UploadedFile

from tests.unit.fingerprint.commands import of


def temporary_upload(content: bytes) -> TemporaryUploadedFile:
    upload = TemporaryUploadedFile("a.txt", "text/plain", len(content), None)
    upload.write(content)
    upload.seek(0)
    return upload


def memory_upload(content: bytes) -> InMemoryUploadedFile:
    return InMemoryUploadedFile(io.BytesIO(content), "file", "a.txt", "text/plain", len(content), None)


@pytest.mark.parametrize("make", [temporary_upload, memory_upload])
def test_an_upload_is_read_and_left_as_it_was(make: Callable[[bytes], UploadedFile[Any]]) -> None:
    content = b"0123456789" * 20_000  # several chunks
    upload = make(content)
    before = of(upload)
    assert upload.tell() == 0
    upload.seek(7)
    assert of(upload) == before
    assert upload.tell() == 7
    assert of(make(content[:-1] + b"x")) != before
    upload.close()


def test_where_an_upload_is_kept_does_not_count() -> None:
    with temporary_upload(b"content") as spilled:
        assert of(spilled) == of(memory_upload(b"content"))


def test_an_upload_that_cannot_be_read_twice_is_named_with_the_remedy() -> None:
    class Pipe(io.BytesIO):
        def seekable(self) -> bool:
            return False

        def tell(self) -> int:
            raise io.UnsupportedOperation("tell")

    closed = memory_upload(b"")
    closed.close()
    for upload in (UploadedFile(Pipe(b""), "pipe.txt"), closed, UploadedFile(None, "nothing.txt")):
        with pytest.raises(TypeError, match="can't be read twice"):
            of(upload)
