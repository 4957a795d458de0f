"""drf-spectacular: documents protected operations in the OpenAPI schema, without annotations.

Set::

    REST_FRAMEWORK = {"DEFAULT_SCHEMA_CLASS": "idempotency.contrib.spectacular.AutoSchema"}
"""

from __future__ import annotations

import copy
from typing import Any

from . import needing

with needing("spectacular"):
    from drf_spectacular import openapi

from drf_spectacular.plumbing import ComponentRegistry, ResolvedComponent
from drf_spectacular.utils import OpenApiParameter
from rest_framework.views import exception_handler

from .. import foreign
from ..conf import settings
from ..http.problems import PROFILES
from ..operation import Operation
from .openapi import PROBLEMS, add_responses, key_parameter
from .rest_framework.key_status import KeyStatusListSerializer, KeyStatusView
from .rest_framework.view_classes import handlers_of_view

__all__ = ["AutoSchema"]


class AutoSchema(openapi.AutoSchema):
    """drf-spectacular's ``AutoSchema``, plus the header and the responses of protected operations.

    ``@extend_schema`` takes precedence. To combine it with a project's own ``AutoSchema``, inherit from both, from this
    class first.
    """

    def get_override_parameters(self) -> list[Any]:
        parameters: list[Any] = super().get_override_parameters()
        operation = self._operation()
        if isinstance(self.view, KeyStatusView):
            path = OpenApiParameter("path", description="The path of the request, where a key belongs to one path.")
            parameters = [path, *parameters]
        elif operation is None:
            return parameters
        header = key_parameter(operation)
        options = {"type": header.pop("schema"), "location": header.pop("in")}
        return [OpenApiParameter(**options, **header), *parameters]

    def get_operation_id(self) -> str:
        name: str = super().get_operation_id()
        return f"{name.removesuffix('_retrieve')}_list" if self._lists_keys() else name

    def get_response_serializers(self) -> Any:
        return KeyStatusListSerializer if self._lists_keys() else super().get_response_serializers()

    def get_operation(
        self, path: str, path_regex: str, path_prefix: str, method: str, registry: ComponentRegistry
    ) -> Any:
        described = super().get_operation(path, path_regex, path_prefix, method, registry)
        operation = self._operation()
        if described and operation is not None:
            add_responses(operation, described["responses"], self.get_problem_content())
        return described

    def get_problem_content(self) -> dict[str, Any] | None:
        """The content of this package's errors, by content type. None if ``ERROR_RESPONSE`` or the project's
        ``EXCEPTION_HANDLER`` creates it: override this method to describe it.
        """
        operation = self._operation()
        if (
            operation is None
            or settings().error_response is not None
            or self.view.get_exception_handler() is not exception_handler
        ):
            return None
        make: Any = ResolvedComponent  # it has no type annotations
        name, schema = PROBLEMS[operation.policy.profile]
        component = make(name=name, type=ResolvedComponent.SCHEMA, object=name, schema=copy.deepcopy(schema))
        foreign.register_component(self)(component)
        return {PROFILES[operation.policy.profile].content_type: {"schema": component.ref}}

    def _lists_keys(self) -> bool:
        view = self.view
        return isinstance(view, KeyStatusView) and view.operation is None and "{operation}" not in foreign.path(self)

    def _operation(self) -> Operation | None:
        handlers = handlers_of_view(type(self.view), getattr(self.view, foreign.ACTION_MAP, None), vars(self.view))
        return next((routed.operation_for(self.method) for routed in handlers if self.method in routed.methods), None)
