// Sends a request that must take effect once, and retries with the same key until its outcome is known.
//
// The key and the body are stored in localStorage under a purpose, for example a cart, before anything is sent. After a
// double click, a reload or the back button, and in another tab, the stored request is continued.

const ATTEMPTS = 12;
const LONGEST_WAIT = 30000; // milliseconds
const UNKNOWN = [408, 425, 429];
const IN_PROGRESS = ["idempotency_in_progress", "idempotency_key_in_use", "idempotency_in_flight"];

const running = new Map();

const nameOf = (purpose) => `pay-once:${purpose}`;

/** The stored request for a purpose: {key, url, body, outcome}, or null. It has no outcome until that is known. */
export function kept(purpose) {
  return JSON.parse(localStorage.getItem(nameOf(purpose)));
}

/**
 * Send a payload once for a purpose, or continue the stored request with its key and body.
 * Resolves to the outcome, {status, body}, or to an error with a status of 400 or more that the user can correct, for
 * example an expired session. Resolves to null if the outcome is still unknown: inform the user, and call this later.
 *
 * options.headers() returns additional headers for each attempt. options.send replaces fetch.
 */
export function payOnce(purpose, url, payload, options = {}) {
  if (!running.has(purpose)) { // a double click joins the first call
    const attempt = begin(purpose, url, payload)
      .then(() => send(purpose, options))
      .finally(() => running.delete(purpose));
    running.set(purpose, attempt);
  }
  return running.get(purpose);
}

// Two tabs that start at the same moment must not create two keys. A lock applies to all tabs.
function begin(purpose, url, payload) {
  return navigator.locks.request(nameOf(purpose), () => {
    if (kept(purpose) === null) {
      keep(purpose, { key: crypto.randomUUID(), url, body: JSON.stringify(payload) });
    }
  });
}

function keep(purpose, entry) {
  localStorage.setItem(nameOf(purpose), JSON.stringify(entry));
}

async function send(purpose, { headers = () => ({}), send: request = fetch }) {
  for (let attempt = 1; attempt <= ATTEMPTS; attempt += 1) {
    const entry = kept(purpose);
    if (entry === null) {
      return null; // removed by another tab, for example at logout
    }
    if (entry.outcome) {
      return entry.outcome; // stored by another tab
    }
    let wait = 0;
    try {
      const response = await request(entry.url, {
        method: "POST",
        body: entry.body,
        headers: { ...headers(), "Content-Type": "application/json", "Idempotency-Key": entry.key },
      });
      const body = await response.json().catch(() => null);
      const answer = { status: response.status, body };
      if (isOutcome(response, body)) {
        keep(purpose, { ...entry, outcome: answer });
        return answer;
      }
      if (!isOpen(response, body)) {
        return response.status < 400 ? null : answer;
      }
      // Retry-After may be a date, which counts as 0, or too long for a user to wait.
      wait = Math.min(LONGEST_WAIT, 1000 * (Number(response.headers.get("Retry-After")) || 0));
    } catch {
      // Without a response, the request may have taken effect. Only a retry with the same key finds out.
    }
    const backoff = Math.random() * Math.min(LONGEST_WAIT, 250 * 2 ** attempt);
    await pause(wait + backoff);
  }
  return null;
}

// Whether a response is the operation's outcome, according to the server's header. Without the header, only a 2xx with
// JSON is one: a login page, a proxy error or a response from another URL contains no information about a payment.
function isOutcome(response, body) {
  const known = response.headers.get("Idempotency-Status");
  if (known === null || known === "ignored") {
    return response.ok && response.status !== 202 && !response.redirected && body !== null;
  }
  return known === "executed" || known === "replayed";
}

// Whether another attempt may get the outcome.
function isOpen(response, body) {
  const { status } = response;
  const known = response.headers.get("Idempotency-Status");
  if (known === "in-progress") {
    return true;
  }
  if (["recorded", "reused", "ignored"].includes(known)) {
    return false; // settled, or another attempt would be another payment
  }
  if (status === 409) {
    return IN_PROGRESS.includes(body?.code ?? body?.error?.code);
  }
  return status >= 500 || status === 202 || UNKNOWN.includes(status);
}

// Waits for a time, or until the browser is back online.
function pause(milliseconds) {
  return new Promise((resolve) => {
    setTimeout(resolve, milliseconds);
    addEventListener("online", resolve, { once: true });
  });
}
