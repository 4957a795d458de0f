// The lab: a bad network around both endpoints, and the display of attempts and effects.

import { kept, payOnce } from "./pay-once.js";

const { cart, csrf } = document.body.dataset;
const payload = { cart, amount: 1000 };
const byId = (id) => document.getElementById(id);
const LOG = `lab:${cart}`;

function chance(id) {
  return Math.random() * 100 < Number(byId(id).value);
}

function network(side) {
  return async (url, options) => {
    if (chance("lost-before")) {
      note(side, "lost before the server");
      throw new TypeError("lost");
    }
    note(side, "sent");
    let response;
    try {
      response = await fetch(url, { ...options, headers: { ...options.headers, "Lab-Latency": byId("latency").value } });
    } catch (error) {
      note(side, "no answer");
      throw error;
    }
    if (chance("lost-after")) {
      note(side, `answer ${response.status} lost after the server`);
      throw new TypeError("lost");
    }
    const replayed = response.headers.has("Idempotency-Replayed") ? ", a replay" : "";
    note(side, `answer ${response.status}${replayed}`);
    return response;
  };
}

const headers = () => ({ "X-CSRFToken": csrf });

async function payProtected() {
  const outcome = await payOnce(cart, "/lab/pay/", payload, { headers, send: network("protected") });
  showOutcome(outcome);
}

// What many front ends do: no key, and another try if there was no answer.
async function payUnprotected() {
  const send = network("unprotected");
  for (let attempt = 1; attempt <= 5; attempt += 1) {
    try {
      await send("/lab/unprotected/pay/", {
        method: "POST",
        body: JSON.stringify(payload),
        headers: { ...headers(), "Content-Type": "application/json" },
      });
      return;
    } catch {
      await new Promise((resolve) => setTimeout(resolve, 500 * attempt));
    }
  }
}

function pay() {
  payProtected();
  payUnprotected();
}

// The attempts of all tabs, kept so that a reload shows them.
function note(side, text) {
  const entries = JSON.parse(localStorage.getItem(LOG) ?? "[]");
  entries.push([side, text]);
  localStorage.setItem(LOG, JSON.stringify(entries.slice(-200)));
  showAttempts();
}

function showAttempts() {
  const entries = JSON.parse(localStorage.getItem(LOG) ?? "[]");
  for (const side of ["protected", "unprotected"]) {
    const items = entries.filter(([of]) => of === side).map(([, text]) => {
      const item = document.createElement("li");
      item.textContent = text;
      return item;
    });
    byId(`${side}-attempts`).replaceChildren(...items);
  }
  byId("key").textContent = kept(cart)?.key ?? "none yet";
}

function showOutcome(outcome) {
  const status = byId("outcome");
  if (outcome) {
    status.textContent = outcome.status === 201 ? "Paid." : `Refused with ${outcome.status}.`;
  } else if (kept(cart)) {
    status.textContent = "Not known yet. Press Pay to ask again: it has the same key.";
  }
}

async function showState() {
  try {
    const state = await (await fetch("/lab/state/")).json();
    for (const side of ["protected", "unprotected"]) {
      const count = byId(`${side}-effects`);
      count.textContent = state[side];
      count.className = state[side] > 1 ? "bad" : "good";
    }
    byId("record").textContent = state.record ? `${state.record.status}, attempt ${state.record.attempt}` : "none yet";
  } catch {
    // The next look tells.
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
    window.open("?pay"); // a browser may ask whether this page may open windows
  }
});
addEventListener("storage", () => {
  showAttempts();
  showOutcome(kept(cart)?.outcome);
});

showAttempts();
showState();
if (new URLSearchParams(location.search).has("pay")) {
  history.replaceState(null, "", location.pathname); // a reload of this tab is no further press
  pay();
} else if (kept(cart)?.outcome) {
  showOutcome(kept(cart).outcome);
} else if (kept(cart)) {
  payProtected(); // continue what was under way when the page was left
}
