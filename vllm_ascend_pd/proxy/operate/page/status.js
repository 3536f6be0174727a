// SPDX-License-Identifier: Apache-2.0
// Reads status.json again and again, and puts it into the page: as text, never as HTML.
"use strict";

const EVERY_MS = 2000;
const TIMEOUT_MS = 5000;

const VERDICTS = {
  ok: "All engines are well",
  degraded: "Some engines are not well",
  unavailable: "Requests cannot be served",
};
const ROLES = { prefill: "Prefill engines", decode: "Decode engines" };
const NOTHING = "–";

// Kept nowhere else: answers of engines come from the page's own origin, and could read a browser's storage.
let token = "";

const byId = (id) => document.getElementById(id);
const whole = new Intl.NumberFormat("en");
const compact = new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 3 });
const clock = new Intl.DateTimeFormat("en-GB", { timeStyle: "medium" });
const day = new Intl.DateTimeFormat("en-GB", { dateStyle: "medium" });

function say(element, text) {
  if (element.textContent !== text) element.textContent = text; // a screen reader reads what changes
}

function clone(id) {
  return byId(id).content.firstElementChild.cloneNode(true);
}

function count(element, number, format = whole) {
  say(element, number === null ? NOTHING : format.format(number));
  element.toggleAttribute("data-none", !number);
}

function plural(number, one, many) {
  return `${whole.format(number)} ${number === 1 ? one : many}`;
}

function ago(seconds) {
  if (seconds < 60) return `${Math.max(0, Math.round(seconds))} s ago`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min ago`;
  if (seconds < 86400) return `${Math.floor(seconds / 3600)} h ago`;
  return plural(Math.floor(seconds / 86400), "day ago", "days ago");
}

// Makes the children of `parent` those of `items`, in their order, and keeps the ones that are there already.
function keep(parent, items, key, make, show) {
  const old = new Map([...parent.children].map((child) => [child.dataset.key, child]));
  items.forEach((item, place) => {
    const name = String(key(item));
    let child = old.get(name);
    old.delete(name);
    if (child === undefined) {
      child = make(item);
      child.dataset.key = name;
    }
    if (parent.children[place] !== child) parent.insertBefore(child, parent.children[place] ?? null);
    show(child, item);
  });
  for (const child of old.values()) child.remove();
}

function showEngine(row, engine, role) {
  const badge = row.querySelector(".badge");
  row.dataset.state = badge.dataset.state = engine.state;
  say(badge, engine.state);
  say(row.querySelector(".url"), engine.url);
  const wrong = engine.wrong_kv ? `verify_kv has found wrong KV ${plural(engine.wrong_kv, "time", "times")}` : "";
  say(row.querySelector("small"), [engine.reason, wrong].filter(Boolean).join(" · "));
  for (const field of ["in_flight", "running", "queued"]) count(row.querySelector(`[data-field=${field}]`), engine[field]);
  count(row.querySelector("[data-field=tokens]"), engine.tokens, compact);
  say(row.querySelector("[data-field=places]"), `${engine.seats_taken} of ${role.seats_per_engine}`);
  const share = engine.kv_capacity && engine.kv_tokens !== null ? engine.kv_tokens / engine.kv_capacity : null;
  const bar = row.querySelector(".bar");
  bar.hidden = share === null;
  bar.toggleAttribute("data-full", (share ?? 0) >= 0.9);
  bar.firstElementChild.style.width = `${100 * Math.min(1, share ?? 0)}%`;
  const tokens = (number) => compact.format(number);
  const text = share === null ? NOTHING : `${Math.round(100 * share)}% of ${tokens(engine.kv_capacity)} tokens`;
  const waiting = Math.round(100 * (engine.kv_waiting ?? 0));
  say(row.querySelector(".share"), waiting ? `${text}, ${waiting}% wait` : text);
}

function makeRole(role) {
  const section = clone("role-template");
  const title = section.querySelector("h2");
  title.id = `${role.role}-title`;
  say(title, ROLES[role.role]);
  section.setAttribute("aria-labelledby", title.id);
  section.querySelector("table").setAttribute("aria-labelledby", title.id);
  return section;
}

function showRole(section, role) {
  const facts = [plural(role.failures, "failed attempt", "failed attempts"), plural(role.retries, "retry", "retries")];
  if (role.seats_per_engine !== null || role.waiting) facts.unshift(`${whole.format(role.waiting)} waiting for a place`);
  say(section.querySelector(".muted"), facts.join(" · "));
  section.querySelector(".empty").hidden = role.engines.length > 0;
  section.querySelector("div.card").hidden = role.engines.length === 0;
  keep(
    section.querySelector("tbody"),
    role.engines,
    (engine) => engine.id,
    () => clone("engine-template"),
    (row, engine) => showEngine(row, engine, role),
  );
  for (const cell of section.querySelectorAll("[data-column=places]")) cell.hidden = role.seats_per_engine === null;
  for (const cell of section.querySelectorAll("[data-column=tokens]")) cell.hidden = role.role !== "prefill";
}

function showFailure(item, failure, now) {
  const at = new Date(failure.at * 1000);
  const time = item.querySelector("time");
  const sameDay = day.format(at) === day.format(new Date(now * 1000));
  say(item.querySelector("b"), `${failure.role}: ${failure.kind}`);
  say(item.querySelector(".url"), failure.engine);
  say(item.querySelector(".reason"), failure.reason);
  time.dateTime = at.toISOString();
  say(time, sameDay ? clock.format(at) : `${day.format(at)}, ${clock.format(at)}`);
  say(item.querySelector(".ago"), ago(now - failure.at));
  say(item.querySelector("code"), failure.request);
}

function show(status) {
  say(byId("version"), `vllm-ascend-pd ${status.version}`);
  byId("verdict").dataset.state = status.verdict;
  say(byId("verdict"), VERDICTS[status.verdict]);
  say(byId("updated"), `as of ${clock.format(new Date(status.time * 1000))}`);
  say(byId("in-flight"), whole.format(status.requests.in_flight));
  say(byId("limit"), whole.format(status.requests.limit));
  say(byId("waiting"), whole.format(status.requests.waiting));
  for (const cell of document.querySelectorAll("[data-phase]")) count(cell, status.requests.phases[cell.dataset.phase]);
  keep(byId("roles"), status.roles, (role) => role.role, makeRole, showRole);
  byId("no-failures").hidden = status.failures.length > 0;
  byId("failures").hidden = status.failures.length === 0;
  keep(
    byId("failures"),
    status.failures,
    (failure) => failure.number,
    () => clone("failure-template"),
    (item, failure) => showFailure(item, failure, status.time),
  );
  byId("problems").hidden = status.problems.length === 0;
  keep(byId("problems"), status.problems, (problem) => problem, () => document.createElement("li"), say);
  byId("status").hidden = false;
}

function signIn(refused) {
  byId("status").hidden = byId("problems").hidden = true;
  byId("sign-in").hidden = false;
  byId("refused").hidden = !refused;
  say(byId("refused"), refused ? "The proxy does not accept this token." : "");
  byId("verdict").dataset.state = "unknown";
  say(byId("verdict"), "Signed out");
  say(byId("updated"), "");
}

function stale(reason) {
  byId("unreachable").hidden = reason === "";
  say(byId("unreachable"), reason && `No news of the proxy: ${reason}. What is below is old; this page goes on trying.`);
  byId("status").classList.toggle("stale", reason !== "");
}

async function refresh() {
  const headers = token ? { Authorization: `Bearer ${token}` } : {};
  let status;
  try {
    const answer = await fetch("status.json", { headers, cache: "no-store", signal: AbortSignal.timeout(TIMEOUT_MS) });
    if (answer.status === 401) {
      signIn(token !== "");
      token = "";
      stale("");
      return;
    }
    if (!answer.ok) throw new Error(`HTTP ${answer.status}`);
    status = await answer.json();
  } catch (error) {
    stale(error.name === "TimeoutError" ? "no answer in time" : error.name === "TypeError" ? "no connection" : error.message);
    return;
  }
  byId("sign-in").hidden = true;
  stale("");
  show(status);
}

// One refresh at a time; none while nobody looks, or while a token is asked for.
let running = false;

async function tick() {
  if (running || document.hidden || !byId("sign-in").hidden) return;
  running = true;
  try {
    await refresh();
  } finally {
    running = false;
  }
}

byId("sign-in").addEventListener("submit", (event) => {
  event.preventDefault();
  token = byId("token").value.trim();
  byId("token").value = "";
  byId("sign-in").hidden = true;
  tick();
});
document.addEventListener("visibilitychange", tick);
setInterval(tick, EVERY_MS);
tick();
