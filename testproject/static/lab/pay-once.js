// Sends what a user wants done once, under one key, until its outcome is known.
//
// The key and the body are kept in localStorage under the purpose, for example a cart, before anything is sent. So a
// double click, a reload, the back button and another tab find them, and continue instead of beginning anew.

const ATTEMPTS = 12;
const LONGEST_WAIT = 30000; // milliseconds
const UNKNOWN = [408, 425, 429];
const IN_PROGRESS = ["idempotency_in_progress", "idempotency_key_in_use", "idempotency_in_flight"];

const running = new Map();

const nameOf = (purpose) => `pay-once:${purpose}`;

/** What is kept for a purpose: {key, url, body, outcome}, or null. The outcome is missing until it is known. */
export function kept(purpose) {
  return JSON.parse(localStorage.getItem(nameOf(purpose)));
}

/**
 * Send a payload once for a purpose, or continue what was begun for it, with the key and the body of then.
 * Resolves to the outcome, {status, body}, or to a refusal with a status of 400 and more that is to be corrected, for
 * example because the session has ended. Resolves to null if nothing is known yet: call this again later, and say so.
 *
 * options.headers() returns further headers of an attempt, options.send replaces fetch.
 */
export function payOnce(purpose, url, payload, options = {}) {
  if (!running.has(purpose)) { // a double click joins the first one
    const attempt = begin(purpose, url, payload)
      .then(() => send(purpose, options))
      .finally(() => running.delete(purpose));
    running.set(purpose, attempt);
  }
  return running.get(purpose);
}

// Two tabs that begin at the same moment must not make two keys. A lock has its effect in all tabs.
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
      return null; // removed by another tab, where the visitor has logged out
    }
    if (entry.outcome) {
      return entry.outcome; // of another tab
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
      // A proxy may send a date, which is no number, or a time for which nobody waits in front of a page.
      wait = Math.min(LONGEST_WAIT, 1000 * (Number(response.headers.get("Retry-After")) || 0));
    } catch {
      // There was no answer, so it may have happened. Only a retry with the same key finds out.
    }
    const backoff = Math.random() * Math.min(LONGEST_WAIT, 250 * 2 ** attempt);
    await pause(wait + backoff);
  }
  return null;
}

// Whether an answer is what became of the operation: the server says so. If it says nothing, only JSON with a 2xx is: a
// login page, an error of a proxy or an answer from another URL says nothing about a payment.
function isOutcome(response, body) {
  const known = response.headers.get("Idempotency-Status");
  if (known === null || known === "ignored") {
    return response.ok && response.status !== 202 && !response.redirected && body !== null;
  }
  return known === "executed" || known === "replayed";
}

// Whether another attempt may learn the outcome.
function isOpen(response, body) {
  const { status } = response;
  const known = response.headers.get("Idempotency-Status");
  if (known === "in-progress") {
    return true;
  }
  if (["recorded", "reused", "ignored"].includes(known)) {
    return false; // it is settled, or another attempt would be another payment
  }
  if (status === 409) {
    return IN_PROGRESS.includes(body?.code ?? body?.error?.code);
  }
  return status >= 500 || status === 202 || UNKNOWN.includes(status);
}

// Waits, but no longer than until the browser is online again.
function pause(milliseconds) {
  return new Promise((resolve) => {
    setTimeout(resolve, milliseconds);
    addEventListener("online", resolve, { once: true });
  });
}
