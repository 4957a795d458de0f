"""Reads the body of a Django request for the fingerprint, and leaves the request as if nobody had read it."""

from __future__ import annotations

import hashlib
import weakref
from collections import deque
from contextlib import suppress
from io import BytesIO
from tempfile import SpooledTemporaryFile
from typing import Any

from django.conf import settings as django_settings
from django.core.exceptions import SuspiciousOperation
from django.core.files.uploadhandler import FileUploadHandler
from django.http import HttpRequest, RawPostDataException
from django.http.multipartparser import MultiPartParser, MultiPartParserError
from django.utils.datastructures import MultiValueDict

from ..identity.fingerprint import DigestedUpload
from ..identity.parsing import form_pairs, parse_json
from ..outcome import is_json

#: How much of a body is copied at a time.
CHUNK = 64 * 1024

FORM = "application/x-www-form-urlencoded"
MULTIPART = "multipart/form-data"


#: The attribute of a request in which its parts are kept, because the key may be one of them.
_PARTS = "_idempotency_parts"


def parsed_body(http: HttpRequest) -> object:
    """The payload of a request as its handler will see it.

    JSON is compared by its values, a form by its fields, and everything else by its bytes.
    """
    content_type = http.content_type or ""
    if content_type == MULTIPART and has_parts(http):
        return parts(http)
    body = http.body
    if content_type == FORM:
        # The order of the fields doesn't count. They stay encoded, because a handler may read the body differently, for
        # example if a client sends JSON with the content type of a form.
        return ["form", *form_pairs(body)]
    if is_json(content_type):
        # Malformed JSON is compared by its bytes, and the handler reports the mistake.
        with suppress(ValueError):
            return parse_json(body)
    return body


def content_length(http: HttpRequest) -> int:
    try:
        return int(http.META.get("CONTENT_LENGTH") or 0)
    except ValueError:
        return 0


def fits_in_memory(http: HttpRequest) -> bool:
    """Whether Django itself would keep the body in memory."""
    limit = django_settings.DATA_UPLOAD_MAX_MEMORY_SIZE
    return limit is None or content_length(http) <= limit


def keep_readable(http: HttpRequest) -> None:
    """Buffer a body that fits in memory, because parsing would consume its stream."""
    if fits_in_memory(http):
        # If the body was read already, for example by the CSRF check, its form is parsed and its stream is gone.
        with suppress(RawPostDataException):
            http.body  # noqa: B018 - reading it is what buffers it


def has_parts(http: HttpRequest) -> bool:
    """Whether Django parses the parts. It does so for a POST with a Content-Length only."""
    return http.method == "POST" and content_length(http) > 0


def parts(http: HttpRequest) -> MultiValueDict[str, object]:
    """The fields and files of a multipart form.

    They are parsed here with Django's limits. Django parses the form again for the handler, which may still choose its
    upload handlers.
    """
    known: MultiValueDict[str, object] | None = getattr(http, _PARTS, None)
    if known is not None:
        return known
    if hasattr(http, "_files"):  # parsed already, for example by the CSRF check
        fields, files = http.POST, http.FILES
    else:
        fields, files = _read_parts(http)
    found: MultiValueDict[str, object] = MultiValueDict({name: [*values] for name, values in fields.lists()})
    for name, uploads in files.lists():
        found.setlist(name, found.getlist(name) + uploads)
    setattr(http, _PARTS, found)
    return found


def form_values(http: HttpRequest, name: str) -> list[Any]:
    """The values of a field of the form that was sent by POST; an empty list if there is none."""
    if http.content_type == MULTIPART and has_parts(http):
        return parts(http).getlist(name)
    if http.content_type == FORM and http.method == "POST":
        keep_readable(http)
        return http.POST.getlist(name)
    return []


def _read_parts(http: HttpRequest) -> tuple[Any, Any]:
    keep_readable(http)
    copy = None if hasattr(http, "_body") else _Copy(http)
    stream: Any = BytesIO(http.body) if copy is None else copy
    try:
        parsed = MultiPartParser(http.META, stream, [_DigestHandler(http)], http.encoding).parse()
    except (MultiPartParserError, SuspiciousOperation):
        # As in Django: the error page reads the form, which must not be parsed again for it.
        http._mark_post_parse_error()  # type: ignore[attr-defined]
        raise
    if copy is not None:
        copy.hand_back()
    return parsed


class _DigestHandler(FileUploadHandler):
    """Computes the digest of each file and does not keep its content."""

    def new_file(self, *args: Any, **kwargs: Any) -> None:
        super().new_file(*args, **kwargs)
        self.digest = hashlib.sha256()

    def receive_data_chunk(self, raw_data: bytes, start: int) -> None:
        self.digest.update(raw_data)

    def file_complete(self, file_size: int) -> DigestedUpload:
        return DigestedUpload(
            self.digest.hexdigest(),
            name=self.file_name,
            content_type=self.content_type,
            size=file_size,
            charset=self.charset,
        )


class _Copy:
    """The stream of a body that is too large for memory. It is copied to disk while it is read."""

    def __init__(self, http: HttpRequest) -> None:
        self._http = http
        self._copy = SpooledTemporaryFile(max_size=CHUNK)  # noqa: SIM115 - closed when the request is forgotten
        weakref.finalize(http, self._copy.close)

    def read(self, size: int = CHUNK) -> bytes:
        data = self._http.read(size)
        self._copy.write(data)
        return data

    def hand_back(self) -> None:
        """Let the request be read from its beginning again."""
        deque(iter(self.read, b""), maxlen=0)  # also copy what follows the last boundary
        self._copy.seek(0)
        # Django has no public function for this. Its own read() and body use these two attributes.
        self._http._stream = self._copy  # type: ignore[assignment]
        self._http._read_started = False  # type: ignore[attr-defined]
