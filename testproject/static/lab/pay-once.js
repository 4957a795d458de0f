// Sends what a user wants done once, under one key, until its outcome is known.
//
// The key and the body are kept in localStorage under the purpose, for example a cart, before anything is sent. So a
// double click, a reload, the back button and another tab find them, and continue instead of beginning anew.

const ATTEMPTS = 12;
const LONGEST_WAIT = 30000; // milliseconds
const UNKNOWN = [408, 425, 429, 502, 503, 504];

const running = new Map();

const nameOf = (purpose) => `pay-once:${purpose}`;

/** What is kept for a purpose: {key, url, body, outcome}, or null. The outcome is missing until it is known. */
export function kept(purpose) {
  return JSON.parse(localStorage.getItem(nameOf(purpose)));
}

/**
 * Send a payload once for a purpose, or continue what was begun for it, with the key and the body of then.
 * Resolves to the answer, {status, body}, or to null if there is none yet: call this again later, and say so.
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
      if (isAnswer(response.status, body)) {
        const outcome = { status: response.status, body };
        if (isOutcome(response.status, body)) {
          keep(purpose, { ...entry, outcome });
        }
        return outcome;
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

// Whether there is no use in another attempt now.
function isAnswer(status, body) {
  if (status === 409) {
    return body?.code !== "idempotency_in_progress";
  }
  return status < 500 && status !== 202 && !UNKNOWN.includes(status);
}

// Whether an answer is what became of the operation. A request that was refused before it ran, for example because the
// session has ended, is sent again with the same key once that is corrected.
function isOutcome(status, body) {
  return status !== 401 && status !== 403 && !String(body?.code).startsWith("idempotency_");
}

// Waits, but no longer than until the browser is online again.
function pause(milliseconds) {
  return new Promise((resolve) => {
    setTimeout(resolve, milliseconds);
    addEventListener("online", resolve, { once: true });
  });
}
