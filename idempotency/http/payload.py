"""The parts of a Django request that are fingerprinted: its body, its place, and its route's arguments.

The request stays readable for its handler.

The place is the URL pattern's name with its namespaces, so two patterns of one view are two places, unless they have
the same name. The path is not used, because a trailing slash, a prefix, a language or a proxy may change it. A pattern
without a name is identified by its text, without the trailing slash.
"""

from __future__ import annotations

import hashlib
import shutil
import weakref
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from datetime import date
from decimal import Decimal
from io import BytesIO
from tempfile import TemporaryFile
from typing import Any
from uuid import UUID

from django.conf import settings as django_settings
from django.core.exceptions import BadRequest, SuspiciousOperation
from django.core.files.uploadhandler import FileUploadHandler
from django.db.models import Model
from django.http import HttpRequest, QueryDict, RawPostDataException
from django.http.multipartparser import MultiPartParser, MultiPartParserError
from django.urls import ResolverMatch
from django.utils.datastructures import MultiValueDict

from .. import foreign
from ..bodies import is_json
from ..exceptions import PayloadUnreadableError
from ..identity.fingerprint import DigestedUpload
from ..identity.parsing import form_pairs, parse_json

FORM = "application/x-www-form-urlencoded"
MULTIPART = "multipart/form-data"

#: The attribute of a request that caches its parts, because the key may be one of them.
_PARTS = "_idempotency_parts"


def parsed_body(http: HttpRequest) -> object:
    """The payload of a request: the values of JSON, the fields of a form, or else the bytes."""
    content_type = http.content_type or ""
    if content_type == MULTIPART and has_parts(http):
        return parts(http)
    content_length(http)  # otherwise Django's ``body`` may raise ValueError
    body = http.body
    if content_type == FORM:
        # The order of the fields doesn't count. They stay encoded, because the handler may read the body differently,
        # for example as JSON that a client sends with a form's content type.
        return ["form", *form_pairs(body)]
    if is_json(content_type):
        # Malformed JSON is compared by its bytes, and the handler reports it.
        with suppress(ValueError):
            return parse_json(body)
    return body


def with_headers(payload: object, http: HttpRequest, names: Collection[str]) -> object:
    """The payload and the named headers that the request has."""
    return [payload, {name.lower(): http.headers[name] for name in names if name in http.headers}]


def content_length(http: HttpRequest) -> int:
    """:raises BadRequest: Content-Length is not a number."""
    try:
        return int(http.META.get("CONTENT_LENGTH") or 0)
    except ValueError:
        raise BadRequest("Content-Length is not a number.") from None


def fits_in_memory(http: HttpRequest) -> bool:
    """Whether Django would keep the body in memory."""
    limit = django_settings.DATA_UPLOAD_MAX_MEMORY_SIZE
    return limit is None or content_length(http) <= limit


def keep_readable(http: HttpRequest) -> None:
    """Buffer a body that fits in memory, because parsing would consume its stream."""
    if fits_in_memory(http):
        # If the CSRF check has already read the body, its form is parsed and its stream is consumed.
        with suppress(RawPostDataException):
            http.body  # noqa: B018 - buffers it


def has_parts(http: HttpRequest) -> bool:
    """Whether the handler finds parsed parts: Django parses a POST with a Content-Length, middleware others."""
    if http.method == "POST":
        return content_length(http) > 0
    if not hasattr(http, foreign.FILES):
        return False
    # For another method Django sets an empty form, and leaves the body unread.
    return bool(http.POST or http.FILES) or (foreign.has_started(http) and not hasattr(http, foreign.BODY))


def parts(http: HttpRequest) -> MultiValueDict[str, object]:
    """The fields and files of a multipart form, parsed with Django's limits.

    Django parses the form again for the handler, which may still choose its upload handlers.
    """
    kept: MultiValueDict[str, object] | None = getattr(http, _PARTS, None)
    if kept is not None:
        return kept
    if hasattr(http, foreign.FILES):  # parsed already, for example by the CSRF check or by a middleware
        fields, files = http.POST, http.FILES
    else:
        fields, files = _read_parts(http)
    merged: MultiValueDict[str, object] = MultiValueDict({name: [*values] for name, values in fields.lists()})
    for name, uploads in files.lists():
        merged.setlist(name, merged.getlist(name) + uploads)
    setattr(http, _PARTS, merged)
    return merged


def form_values(http: HttpRequest, name: str) -> list[Any]:
    """The values of a field of the form, if it was sent by POST or parsed by middleware; otherwise none."""
    if http.content_type == MULTIPART and has_parts(http):
        return parts(http).getlist(name)
    if http.method == "POST" or hasattr(http, foreign.POST):
        keep_readable(http)
        with suppress(BadRequest):  # Django reads forms in UTF-8 only, but the handler may read others itself
            return http.POST.getlist(name)
        return QueryDict(http.body, encoding="latin-1").getlist(name)  # keys and the names of fields are ASCII
    return []


def _read_parts(http: HttpRequest) -> tuple[Any, Any]:
    keep_readable(http)
    copy = None if hasattr(http, foreign.BODY) else _Copy(http)
    stream: Any = BytesIO(http.body) if copy is None else copy
    try:
        parsed = MultiPartParser(http.META, stream, [_DigestHandler()], http.encoding).parse()
    except (MultiPartParserError, SuspiciousOperation):
        foreign.mark_parse_error(http)
        raise
    if copy is not None:
        copy.hand_back()
    return parsed


class _DigestHandler(FileUploadHandler):
    """Computes the digest of each file without keeping its content."""

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
            charset=self.charset,
        )


class _Copy:
    """The stream of a body that is too large for memory. It is copied to disk while it is read."""

    def __init__(self, http: HttpRequest) -> None:
        self._http = http
        self._copy = TemporaryFile()  # noqa: SIM115 - closed when the request is forgotten
        weakref.finalize(http, self._copy.close)

    def read(self, size: int) -> bytes:
        data = self._http.read(size)
        self._copy.write(data)
        return data

    def hand_back(self) -> None:
        """Rewind the request to its beginning."""
        shutil.copyfileobj(self._http, self._copy)  # the rest, after the last boundary
        self._copy.seek(0)
        foreign.set_stream(self._http, self._copy)
        foreign.set_started(self._http, False)


#: The key of the place among the route's arguments. No argument can have this name.
PLACE = ""


def route_of(
    match: ResolverMatch | None, arguments: Mapping[str, object], is_named: Callable[[ResolverMatch], bool]
) -> dict[str, object]:
    """The place of a request and the arguments of its route by name or position.

    :param match: None if no URL led to the view, as in a test that calls it. Then the view's keyword
        ``arguments`` are used.
    :param is_named: whether the project has named the URL pattern.
    :raises PayloadUnreadableError: an argument's text would differ at a retry.
    """
    if match is None:
        return {name: _comparable(value) for name, value in arguments.items()}
    arguments = match.kwargs
    if match.args:
        arguments = {str(position): value for position, value in enumerate(match.args)} | arguments
    place = match.view_name if is_named(match) else f"/{(match.route or '').rstrip('/?$')}"
    return {PLACE: place} | {name: _comparable(value) for name, value in arguments.items()}


def _comparable(value: object) -> object:
    """A route argument as a value that can be fingerprinted. A converter may return anything, even a model instance."""
    if isinstance(value, Model):
        return [value._meta.label, _comparable(value.pk)]
    if isinstance(value, (str, int, UUID, date, Decimal)):
        return value
    try:
        text = str(value)
    except Exception as error:
        raise PayloadUnreadableError(
            f"The text of a route argument of type {type(value).__qualname__} is compared with a retry's, and its "
            f"__str__ raised {type(error).__name__}. Correct it."
        ) from error
    if " at 0x" in text:  # the default text of an object
        raise PayloadUnreadableError(
            f"The text of a route argument of type {type(value).__qualname__} is its address in memory, so a retry "
            f"would look like another request. Give the type a __str__ that differs for each value."
        )
    return text
