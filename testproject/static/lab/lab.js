// The retry lab: simulates a bad network for both endpoints, and displays attempts and effects.

import { kept, payOnce } from "./pay-once.js";

const { cart, csrf } = document.body.dataset;
const payload = { cart, amount: 1000 };
const byId = (id) => document.getElementById(id);
const LOG = `lab:${cart}`;
const PRESSES = `lab:${cart}:presses`;
const MEANINGS = { 201: "charged", 409: "in progress" };

function chance(id) {
  return Math.random() * 100 < Number(byId(id).value);
}

// A bad network loses the first answer of each side, so that the first press shows the difference.
function loses(side) {
  const isFirst = !noted().some(([of, , text]) => of === side && /^\d/.test(text));
  return chance("lost-after") || (isFirst && Number(byId("lost-after").value) > 0);
}

function network(side, press) {
  return async (url, options) => {
    if (chance("lost-before")) {
      note(side, press, "request lost on the way");
      throw new TypeError("lost");
    }
    note(side, press, "sent");
    const sent = Date.now();
    let response;
    try {
      response = await fetch(url, { ...options, headers: { ...options.headers, "Lab-Latency": byId("latency").value } });
    } catch (error) {
      note(side, press, "no answer");
      throw error;
    }
    const meaning = response.headers.has("Idempotency-Replayed") ? "replayed" : MEANINGS[response.status];
    const answer = [response.status, meaning].filter(Boolean).join(", ");
    const lost = loses(side);
    note(side, press, `${answer}, after ${((Date.now() - sent) / 1000).toFixed(1)} s${lost ? ": lost on the way back" : ""}`);
    if (lost) {
      throw new TypeError("lost");
    }
    return response;
  };
}

const headers = () => ({ "X-CSRFToken": csrf });
let paying = false;

async function payProtected(press) {
  paying = true;
  try {
    showOutcome(await payOnce(cart, "/lab/pay/", payload, { headers, send: network("protected", press) }));
  } finally {
    paying = false;
  }
}

// payOnce() would join another press to the first one. The lab also sends it, to show its response.
async function sendAgain(press) {
  // The first press creates the key under this lock.
  const { key, url, body } = await navigator.locks.request(`pay-once:${cart}`, () => kept(cart));
  const options = { method: "POST", body, headers: { ...headers(), "Content-Type": "application/json", "Idempotency-Key": key } };
  await retrying(() => network("protected", press)(url, options));
}

// As in many front ends: no key, and a retry if there was no response.
async function payUnprotected(press) {
  const options = { method: "POST", body: JSON.stringify(payload), headers: { ...headers(), "Content-Type": "application/json" } };
  await retrying(() => network("unprotected", press)("/lab/unprotected/pay/", options));
}

async function retrying(send) {
  for (let attempt = 1; attempt <= 5; attempt += 1) {
    try {
      return await send();
    } catch {
      await new Promise((resolve) => setTimeout(resolve, 500 * attempt));
    }
  }
}

function pay() {
  const press = Number(localStorage.getItem(PRESSES)) + 1;
  localStorage.setItem(PRESSES, press);
  if (paying || kept(cart)?.outcome) {
    sendAgain(press);
  } else {
    payProtected(press);
  }
  payUnprotected(press);
}

// The attempts of all tabs. They survive a reload.
const noted = () => JSON.parse(localStorage.getItem(LOG) ?? "[]");

function note(side, press, text) {
  localStorage.setItem(LOG, JSON.stringify([...noted(), [side, press, text, Date.now()]].slice(-200)));
  showAttempts();
}

function showAttempts() {
  const entries = noted();
  for (const side of ["protected", "unprotected"]) {
    const rows = entries.filter(([of]) => of === side).map(([, press, text, time]) => {
      const row = document.createElement("tr");
      for (const cell of [`+${((time - entries[0][3]) / 1000).toFixed(1)} s`, press, text]) {
        row.insertCell().textContent = cell;
      }
      row.lastChild.className = /lost|no answer/.test(text) ? "bad" : "";
      return row;
    });
    byId(`${side}-attempts`).replaceChildren(...rows);
  }
  byId("key").textContent = kept(cart)?.key ?? "none yet";
}

function showOutcome(outcome) {
  const status = byId("outcome");
  if (outcome) {
    status.textContent = outcome.status === 201 ? "Paid." : `Refused with ${outcome.status}.`;
  } else if (kept(cart)) {
    status.textContent = "Unknown. Press Pay to retry with the same key.";
  }
}

async function showState() {
  try {
    const state = await (await fetch("/lab/state/")).json();
    for (const side of ["protected", "unprotected"]) {
      const count = state[side];
      byId(`${side}-effects`).textContent = count === 1 ? "1 charge" : `${count} charges`;
      byId(`${side}-total`).textContent = (count * payload.amount / 100).toFixed(2);
      byId(`${side}-total`).className = ["", "good"][count] ?? "bad";
    }
    byId("record").textContent = state.record ? `${state.record.status}, attempt ${state.record.attempt}` : "none yet";
  } catch {
    // The server may be restarting. The next poll is scheduled below.
  }
  setTimeout(showState, 400);
}

for (const slider of document.querySelectorAll("input[type=range]")) {
  const name = `lab:${slider.id}`;
  slider.value = localStorage.getItem(name) ?? slider.value;
  const show = () => {
    document.querySelector(`output[for=${slider.id}]`).textContent = slider.value;
    localStorage.setItem(name, slider.value);
  };
  slider.addEventListener("input", show);
  show();
}

byId("pay").addEventListener("click", pay);
byId("tabs").addEventListener("click", () => {
  for (let tab = 0; tab < 5; tab += 1) {
    window.open("?pay"); // the browser may ask for permission to open windows
  }
});
addEventListener("storage", () => {
  showAttempts();
  showOutcome(kept(cart)?.outcome);
});

showAttempts();
showState();
if (new URLSearchParams(location.search).has("pay")) {
  history.replaceState(null, "", location.pathname); // so that a reload of this tab does not pay again
  pay();
} else if (kept(cart)?.outcome) {
  showOutcome(kept(cart).outcome);
} else if (kept(cart)) {
  payProtected("reload"); // continue a payment that was in progress when the visitor left the page
}
