// An Express application with one operation, protected by the package that PACKAGE names.
const crypto = require("crypto");
const fs = require("fs");
const express = require("express");

const app = express();
app.use(express.json());
if (process.env.STORE.endsWith("by account")) {
  app.use((request, response, next) => {
    const { authorization, "idempotency-key": key } = request.headers;
    if (!authorization) return response.status(401).send({});
    if (key) request.headers["idempotency-key"] = `${authorization} ${key}`;
    next();
  });
}

// A refusal has no effect.
function run(request, respond) {
  const status = request.body.outcome || 201;
  const takes = (request.body.seconds || 0.2) * 1000;
  if (status < 300) fs.appendFileSync(process.env.EFFECTS, "line\n");
  setTimeout(() => respond(status, { run: crypto.randomUUID() }), takes);
}

if (process.env.PACKAGE === "express-idempotency") {
  const { idempotency, getSharedIdempotencyService } = require("express-idempotency");
  app.use(idempotency());
  app.post(["/charges", "/refunds"], (request, response) => {
    if (getSharedIdempotencyService().isHit(request)) return;
    run(request, (status, body) => response.status(status).send(body));
  });
} else {
  // The core has no middleware. These are the calls of its documentation, with the statuses of its NestJS plugin.
  const { Idempotency } = require("@node-idempotency/core");
  const { MemoryStorageAdapter } = require("@node-idempotency/storage-adapter-memory");
  const store = new Idempotency(new MemoryStorageAdapter(), { enforceIdempotency: true });
  const statuses = {
    REQUEST_IN_PROGRESS: 409,
    IDEMPOTENCY_FINGERPRINT_MISSMATCH: 422,
    IDEMPOTENCY_KEY_MISSING: 400,
    IDEMPOTENCY_KEY_LEN_EXEEDED: 400,
  };
  app.post(["/charges", "/refunds"], async (request, response) => {
    const call = { method: request.method, headers: request.headers, body: request.body, path: request.path };
    try {
      const kept = await store.onRequest(call);
      if (kept) return response.status(kept.additional.status).send(kept.body);
    } catch (error) {
      return response.status(statuses[error.code] || 500).send({ detail: error.message });
    }
    run(request, async (status, body) => {
      await store.onResponse(call, { body, additional: { status } });
      response.status(status).send(body);
    });
  });
}

app.listen(Number(process.env.PORT), "127.0.0.1");
