"""A FastAPI application with one operation, protected by the package that ``PACKAGE`` names. Served by uvicorn."""

import asyncio
import json
import os

from fastapi import FastAPI
from fastapi.responses import JSONResponse
from operation import TAKES, append_line

PACKAGE = os.environ["PACKAGE"]
app = FastAPI()


async def answer(request):
    status = json.loads(await request.body()).get("outcome", 201)
    number = append_line()
    await asyncio.sleep(TAKES)
    return JSONResponse({"number": number}, status_code=status)


protect = lambda operation: operation  # noqa: E731
if PACKAGE == "fastapi-idempotency":
    from fastapi_idempotency import IdempotencyMiddleware

    app.add_middleware(IdempotencyMiddleware, scope=lambda request: request.headers["authorization"])
elif PACKAGE == "asgi-idempotency-header":
    from idempotency_header_middleware import IdempotencyHeaderMiddleware
    from idempotency_header_middleware.backends import MemoryBackend

    app.add_middleware(IdempotencyHeaderMiddleware, backend=MemoryBackend())
else:
    from idempot.contrib.fastapi import idempotent

    protect = idempotent(cache_on_status=[200, 201])

for path in ("/charges", "/refunds"):
    app.post(path)(protect(answer))
