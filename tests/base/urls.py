"""One protected plain view. Its effect is a group, because Django ships that model."""

import json

from django.contrib.auth.models import Group
from django.http import JsonResponse
from django.urls import path

from idempotency import idempotent


@idempotent("groups.create")
def create_group(request):
    prefix = json.loads(request.body)["prefix"]
    group = Group.objects.create(name=f"{prefix}-{Group.objects.count()}")
    return JsonResponse({"id": group.pk, "name": group.name}, status=201)


urlpatterns = [path("groups/", create_group)]
