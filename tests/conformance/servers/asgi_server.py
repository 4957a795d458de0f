"""A FastAPI application with one operation, protected by the package that ``PACKAGE`` names. Served by uvicorn."""

import asyncio
import os
from contextlib import asynccontextmanager
from pathlib import Path

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from operation import begin

PACKAGE = os.environ["PACKAGE"]
#: The file for records that survive a crash.
FILE = Path(os.environ["EFFECTS"]).with_name("records.sqlite3")
app = FastAPI()


async def answer(request: Request):  # FastAPI needs the annotation
    status, seconds, name = begin(await request.body())
    await asyncio.sleep(seconds)
    return JSONResponse({"run": name}, status_code=status)


protect = lambda operation: operation  # noqa: E731
if PACKAGE == "fastapi-idempotency":
    from fastapi_idempotency import IdempotencyMiddleware

    app.add_middleware(IdempotencyMiddleware, scope=lambda request: request.headers["authorization"])
elif PACKAGE == "asgi-idempotency-header":
    from idempotency_header_middleware import IdempotencyHeaderMiddleware
    from idempotency_header_middleware.backends import MemoryBackend

    app.add_middleware(IdempotencyHeaderMiddleware, backend=MemoryBackend())
elif PACKAGE == "fastapi-idempotency-key":
    from fastapi_idempotency_key import IdempotencyMiddleware, MemoryBackend, SQLiteBackend

    backend = MemoryBackend() if os.environ["STORE"] == "memory" else SQLiteBackend(database_path=FILE)
    app.add_middleware(IdempotencyMiddleware, backend=backend)
elif PACKAGE == "fastidempotent":
    from fastidempotent import IdempotencyMiddleware, MemoryBackend, SQLiteBackend

    backend = MemoryBackend() if os.environ["STORE"] == "memory" else SQLiteBackend(url=f"sqlite+aiosqlite:///{FILE}")
    app.add_middleware(IdempotencyMiddleware, backend=backend)

    @asynccontextmanager
    async def making_the_table(_):
        async with backend:
            yield

    app.router.lifespan_context = making_the_table
elif PACKAGE == "idemkit":
    from idemkit import HttpConfig, IdempotencyMiddleware, InMemoryBackend, RedisBackend

    backend, config = InMemoryBackend(), None
    if os.environ["STORE"] != "memory":
        backend = RedisBackend.from_url(os.environ["REDIS"])
        config = HttpConfig(scope=lambda request: request.headers.get("authorization", "anonymous"))
    app.add_middleware(IdempotencyMiddleware, backend=backend, config=config)
else:
    from idempot.contrib.fastapi import idempotent

    protect = idempotent(cache_on_status=[200, 201])

for path in ("/charges", "/refunds"):
    app.post(path)(protect(answer))
