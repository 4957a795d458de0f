"""drf-spectacular: protected operations are documented in the OpenAPI schema, without annotations.

It is one setting::

    REST_FRAMEWORK = {"DEFAULT_SCHEMA_CLASS": "idempotency.contrib.spectacular.AutoSchema"}
"""

from __future__ import annotations

import copy
from typing import Any

try:
    from drf_spectacular import openapi
except ImportError as error:
    raise ImportError(
        "idempotency.contrib.spectacular needs drf-spectacular. Install it with\n"
        "    python -m pip install 'django-idempotency[spectacular]'"
    ) from error

from drf_spectacular.plumbing import ComponentRegistry, ResolvedComponent
from drf_spectacular.utils import OpenApiParameter
from rest_framework.views import exception_handler

from ..conf import settings
from ..http.class_views import operation_of_request
from ..identity import keys
from ..operation import Operation
from .openapi import KEY_DESCRIPTION, KEY_SCHEMA, PROBLEM, PROBLEM_NAME, add_responses, problem_content


class AutoSchema(openapi.AutoSchema):
    """drf-spectacular's ``AutoSchema``, which also documents the header and the answers of protected operations.

    What ``@extend_schema`` says of a protected operation wins. If the project has an ``AutoSchema`` of its own, make a
    class of both, this one first.
    """

    def get_override_parameters(self) -> list[Any]:
        parameters: list[Any] = super().get_override_parameters()
        operation = self._operation()
        if operation is None:
            return parameters
        header = OpenApiParameter(
            keys.HEADER,
            type=dict(KEY_SCHEMA),
            location=OpenApiParameter.HEADER,
            required=operation.required and operation.key is None,
            description=KEY_DESCRIPTION,
        )
        return [header, *parameters]

    def get_operation(
        self, path: str, path_regex: str, path_prefix: str, method: str, registry: ComponentRegistry
    ) -> Any:
        described = super().get_operation(path, path_regex, path_prefix, method, registry)
        operation = self._operation()
        if described and operation is not None:
            add_responses(operation, described["responses"], self.get_problem_content())
            named = ("header", keys.HEADER.lower())
            headers = [one for one in described.get("parameters", []) if (one["in"], one["name"].lower()) == named]
            if len(headers) > 1:  # the project has written the name in other letters
                described["parameters"].remove(next(one for one in headers if one["name"] == keys.HEADER))
        return described

    def get_problem_content(self) -> dict[str, Any] | None:
        """The content of this package's errors, by content type.

        Override it if the project gives them another form, by ``ERROR_RESPONSE`` or by an ``EXCEPTION_HANDLER`` of its
        own. By default nothing is said of that form.
        """
        if settings.error_response is not None or self.view.get_exception_handler() is not exception_handler:
            return None
        make: Any = ResolvedComponent  # it has no types
        component = make(
            name=PROBLEM_NAME, type=ResolvedComponent.SCHEMA, object=PROBLEM_NAME, schema=copy.deepcopy(PROBLEM)
        )
        self.registry.register_on_missing(component)
        return problem_content(component.ref["$ref"])

    def _operation(self) -> Operation | None:
        return operation_of_request(type(self.view), self.method, getattr(self.view, "action_map", None))
