// The small parts that all pages are made of: icons, buttons, states, times, dialogs, JSON.

import { html, useEffect, useLayoutEffect, useRef, useState } from "./vendor/standalone.module.js";
import { isTold } from "./api.js";
import { copyText } from "./markdown.js";
import { attempt, notify } from "./state.js";

const PATHS = {
  chat: "M3 4.5h10v7H7l-3 2v-2H3z",
  runs: "M3 4h10M3 8h10M3 12h6",
  waiting: "M8 4.5V8l2.5 1.5M8 2.5a5.5 5.5 0 1 1 0 11 5.5 5.5 0 0 1 0-11",
  tree: "M4 3v7.5a2 2 0 0 0 2 2h2M4 6.5h4M10 5h3v3h-3zM10 11h3v3h-3z",
  file: "M4.5 2.5h5l2.5 2.5v8.5h-7.5zM9.5 2.5V5H12",
  store: "M3 5c0-1.2 2.2-2 5-2s5 .8 5 2-2.2 2-5 2-5-.8-5-2v6c0 1.2 2.2 2 5 2s5-.8 5-2V5M3 8c0 1.2 2.2 2 5 2s5-.8 5-2",
  box: "M8 2.5 13 5v6l-5 2.5L3 11V5zM3 5l5 2.5L13 5M8 7.5v6",
  usage: "M3 13V9M6.5 13V5M10 13V7.5M13.5 13V3",
  key: "M10.5 2.8a2.7 2.7 0 1 1 0 5.4 2.7 2.7 0 0 1 0-5.4M8.5 7.5 3 13M4.6 11.4l1.7 1.7M6.8 9.2l1.4 1.4",
  engine: "M2.5 8h2.2l1.6-4 3 8 1.7-4h2.5",
  menu: "M2.5 4.5h11M2.5 8h11M2.5 11.5h11",
  plus: "M8 3v10M3 8h10",
  send: "M8 13V3.5M4 7l4-4 4 4",
  stop: "M4.5 4.5h7v7h-7z",
  copy: "M5.5 5.5h7v8h-7zM3.5 10.5v-8h7",
  edit: "M3 13l.6-2.8L10.5 3.3l2.2 2.2-6.9 6.9z",
  fork: "M5 4v8M5 8h3.5A2.5 2.5 0 0 0 11 5.5V4M3.7 3h2.6M3.7 13h2.6M9.7 3h2.6",
  again: "M13 8a5 5 0 1 1-1.6-3.7M13 2.5v2.6h-2.6",
  trash: "M3 4.5h10M6.5 4.5V3h3v1.5M4.5 4.5l.6 8.5h5.8l.6-8.5",
  clip: "M11.5 6.5 7 11a1.8 1.8 0 0 1-2.6-2.6l5-5a2.9 2.9 0 0 1 4.1 4.1L8.3 12.7a4 4 0 0 1-5.6-5.6l4.2-4.2",
  tool: "M10.5 2.8a3.2 3.2 0 0 0-3.6 4.4L2.8 11.3l1.9 1.9 4.1-4.1a3.2 3.2 0 0 0 4.4-3.6L11 7.6 9 7 8.4 5z",
  thought: "M8 2.5a3.8 3.8 0 0 0-2.2 6.9v1.6h4.4V9.4A3.8 3.8 0 0 0 8 2.5M6.2 13.2h3.6",
  more: "M3.2 7.6h.8v.8h-.8zM7.6 7.6h.8v.8h-.8zM12 7.6h.8v.8h-.8z",
  close: "M4 4l8 8M12 4l-8 8",
  check: "M3.5 8.5 6.5 11.5 12.5 4.5",
  down: "M4 6l4 4 4-4",
  right: "M6 4l4 4-4 4",
  save: "M8 2.5v7.5M5 7.5l3 3 3-3M3 13h10",
  search: "M7 3a4 4 0 1 1 0 8 4 4 0 0 1 0-8M10 10l3.5 3.5",
  sun: "M8 5.2a2.8 2.8 0 1 1 0 5.6 2.8 2.8 0 0 1 0-5.6M8 1.5v1.7M8 12.8v1.7M1.5 8h1.7M12.8 8h1.7M3.4 3.4l1.2 1.2M11.4 11.4l1.2 1.2M3.4 12.6l1.2-1.2M11.4 4.6l1.2-1.2",
  moon: "M12.8 9.6A5.3 5.3 0 0 1 6.4 3.2a5.3 5.3 0 1 0 6.4 6.4z",
  auto: "M8 2.5a5.5 5.5 0 1 1 0 11zM8 2.5a5.5 5.5 0 1 0 0 11z",
  sliders: "M3 5h6M12 5h1M9 3.5v3M3 11h1M7 11h6M7 9.5v3",
  archive: "M2.5 3.5h11v3h-11zM3.5 6.5v6.5h9V6.5M6.5 9h3",
  open: "M9 3h4v4M13 3 7.5 8.5M11.5 9.5V13H3V4.5h3.5",
};

export const Icon = ({ name }) => html`<svg class="icon" viewBox="0 0 16 16" aria-hidden="true" focusable="false">
  <path d=${PATHS[name]} />
</svg>`;

/** What stands before the title of a fork, which has its parent's. */
export const ForkMark = () => html`<span class="fork-mark" dir="ltr" title="A fork"><${Icon} name="fork" />
  <span class="out-of-sight">Fork of</span></span>`;

/** A button. label: what it is called where only its icon is seen. */
export function Button({ icon, label, children, kind = "", small = true, ...rest }) {
  const bare = !children;
  return html`<button
    type="button"
    class=${`button ${small ? "small" : ""} ${kind} ${bare ? "bare" : ""}`}
    aria-label=${label}
    title=${label}
    ...${rest}
  >
    ${icon && html`<${Icon} name=${icon} />`}${children && html`<span>${children}</span>`}
  </button>`;
}

export const STATES = {
  completed: "good", active: "good", processed: "good", running: "good", live: "good", loaded: "good",
  in_progress: "busy", queued: "calm", waiting: "ask", reconnecting: "ask",
  incomplete: "ask", failed: "bad", cancelled: "calm", archived: "calm", expired: "calm",
};

/** A state as a dot and a word. */
export const State = ({ name }) => html`<span class=${`state ${STATES[name] ?? "calm"}`}>
  <i aria-hidden="true"></i>${String(name).replaceAll("_", " ")}
</span>`;

/** The name of a file as it can be shown: signs that turn what stands behind them, and so fake its end, are seen. */
export const fileName = (name) => name?.replace(/[\u202a-\u202e\u2066-\u2069]/g, "\ufffd");

/** The files that were dropped, without folders, which no browser uploads. */
export function droppedFiles({ items }) {
  const files = [...items].filter((item) => item.kind === "file");
  const folders = files.filter((item) => item.webkitGetAsEntry()?.isDirectory);
  if (folders.length) notify("A folder cannot be uploaded. Drop the files that are in it.", "error");
  return files.filter((item) => !folders.includes(item)).map((item) => item.getAsFile());
}

/** An id that is copied by a click. */
export function Id({ value, short = true }) {
  const [done, set] = useState(false);
  const copy = async (event) => {
    event.preventDefault();
    event.stopPropagation();
    set(await copyText(value));
    setTimeout(() => set(false), 1200);
  };
  const shown = short && value.length > 18 ? `${value.slice(0, 12)}…${value.slice(-4)}` : value;
  return html`<button type="button" class="id" title=${`Copy ${value}`} onClick=${copy}>
    ${done ? "copied" : shown}
  </button>`;
}

export function Copy({ text, label = "Copy" }) {
  const [done, set] = useState(false);
  const copy = async () => {
    set(await copyText(typeof text === "function" ? text() : text));
    setTimeout(() => set(false), 1500);
  };
  return html`<${Button} icon=${done ? "check" : "copy"} kind="quiet" label=${done ? "Copied" : label} onClick=${copy} />`;
}

// --- figures

const relative = new Intl.RelativeTimeFormat("en", { numeric: "auto", style: "narrow" });
const UNITS = [["day", 86400], ["hour", 3600], ["minute", 60], ["second", 1]];

/** How long ago, or when, of Unix seconds. */
export function Ago({ at }) {
  if (at === null || at === undefined) return html`<span class="faint">–</span>`;
  const date = new Date(at * 1000);
  const seconds = at - Date.now() / 1000;
  let text = date.toLocaleDateString("en", { day: "numeric", month: "short", year: "numeric" });
  if (Math.abs(seconds) < 10) text = "now";
  else if (Math.abs(seconds) < 7 * 86400) {
    const [unit, size] = UNITS.find(([, size]) => Math.abs(seconds) >= size);
    text = relative.format(Math.round(seconds / size), unit);
  }
  return html`<time datetime=${date.toISOString()} title=${date.toLocaleString("en")}>${text}</time>`;
}

/** A span of time between two times of the API, which are whole seconds. */
export function seconds(value) {
  if (!Number.isFinite(value)) return "–";
  if (value < 1) return "under 1 s";
  if (value === 1) return "under 2 s"; // between whole seconds lies anything from nothing to two
  if (value < 60) return `${Math.round(value)} s`;
  if (value < 3600) return `${Math.floor(value / 60)} min ${Math.round(value % 60)} s`;
  return `${Math.floor(value / 3600)} h ${Math.round((value % 3600) / 60)} min`;
}

/** That a response outlived ends of its server, in words; null for one that did not. */
export function survived({ restarts }) {
  if (!restarts) return null;
  return restarts === 1 ? "continued after a restart" : `continued after ${restarts} restarts`;
}

/** Why the server cancelled a response by itself, in words; null where it did not. */
export function cancelledFor({ cancel_reason }) {
  if (cancel_reason === "unread") return "nobody read it";
  return cancel_reason === "next_turn" ? "the next turn began" : null;
}

export function size(value) {
  if (!Number.isFinite(value)) return "–";
  for (const unit of ["B", "kB", "MB", "GB", "TB"]) {
    if (value < 1000 || unit === "TB") return `${unit === "B" ? value : value.toFixed(1)} ${unit}`;
    value /= 1000;
  }
  return "";
}

const compact = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });
const plain = new Intl.NumberFormat("en");
export const number = (value) => (Number.isFinite(value) ? plain.format(value) : "–");
export const short = (value) => (Number.isFinite(value) ? compact.format(value) : "–");

// --- states of pages

export const Empty = ({ icon, title, children }) => html`<div class="empty">
  <${Icon} name=${icon} />
  <h2>${title}</h2>
  <p>${children}</p>
</div>`;

/** What went wrong. What is told above all pages is not said again. */
export const Failure = ({ error }) => !isTold(error) && html`<div class="failure" role="alert">
  <strong>${error.code ?? "Not done"}</strong> ${error.message}
</div>`;

/** What is loaded, or that it is loading, or why it could not be. */
export function Loaded({ of, children }) {
  if (of.value === null && of.error && !isTold(of.error)) return html`<${Failure} error=${of.error} />`;
  if (of.value === null) return html`<div class="loading" role="status"><i></i><i></i><i></i>
    <span class="out-of-sight">Loading</span></div>`;
  return html`${of.error && html`<${Failure} error=${of.error} />`}${children(of.value)}`;
}

/** The button at the end of a list of which more can be loaded. of: what `useList` returns. */
export const More = ({ of, label = "Show more" }) => of.value?.has_more && html`<div class="centre">
  <${Button} kind="quiet" onClick=${of.more}>${label}<//></div>`;

export function Page({ title, actions, children, note }) {
  return html`<section class="page" aria-labelledby="title">
    <header class="page-head">
      <div>
        <h1 id="title" tabindex="-1">${title}</h1>
        ${note && html`<p class="faint">${note}</p>`}
      </div>
      <div class="actions">${actions}</div>
    </header>
    ${children}
  </section>`;
}

/** A dialog over the page. It takes the focus, keeps it, and gives it back. */
export function Dialog({ title, close, children, wide, label }) {
  const ref = useRef();
  useLayoutEffect(() => {
    const dialog = ref.current;
    const before = document.activeElement;
    dialog.showModal();
    dialog.querySelector("input, textarea, select")?.focus();
    return () => {
      dialog.close();
      before?.focus?.();
    };
  }, []);
  return html`<dialog
    ref=${ref}
    class=${wide ? "wide" : ""}
    aria-label=${title ?? label}
    onCancel=${(event) => {
      event.preventDefault();
      close();
    }}
    onClick=${(event) => event.target === ref.current && close()}
  >
    <div class="dialog">
      ${title && html`<header><h2>${title}</h2><${Button} icon="close" kind="quiet" label="Close" onClick=${close} />
        </header>`}
      ${children}
    </div>
  </dialog>`;
}

/** A button that asks before it does something that cannot be taken back. question: a text, or what resolves to one. */
export function Sure({ icon, label, question, yes = "Delete", onYes, children, kind = "quiet" }) {
  const [asking, set] = useState(null);
  const ask = () => attempt(async () => set(typeof question === "function" ? await question() : question));
  const close = () => set(null);
  return html`<${Button} icon=${icon} label=${label} kind=${kind} onClick=${ask}>${children}<//>
    ${asking &&
    html`<${Dialog} title=${label ?? yes} close=${close}>
      <p>${asking}</p>
      <footer>
        <${Button} small=${false} onClick=${close}>Keep<//>
        <${Button}
          small=${false}
          kind="danger"
          onClick=${() => {
            close();
            onYes();
          }}
          >${yes}<//
        >
      </footer>
    <//>`}`;
}

const MARGIN = 8; // pixels between a popover and the edges of the window

/** Put a popover above or below its button, and nowhere beyond the window. */
function place(popover, button, { up, align }) {
  const at = button.getBoundingClientRect();
  const { clientWidth: width, clientHeight: height } = document.documentElement;
  const left = align === "right" ? at.right - popover.offsetWidth : at.left;
  popover.style.left = `${Math.max(MARGIN, Math.min(left, width - popover.offsetWidth - MARGIN))}px`;
  popover.style[up ? "bottom" : "top"] = `${(up ? height - at.top : at.bottom) + MARGIN}px`;
  popover.style.maxHeight = `${(up ? at.top : height - at.bottom) - 2 * MARGIN}px`;
}

/** A menu or a form below a button, or above it. */
export function Popover({ icon, label, text, children, up = false, kind = "quiet", align = "left" }) {
  const [open, set] = useState(false);
  const ref = useRef();
  useLayoutEffect(() => {
    if (!open) return undefined;
    const fit = () => place(ref.current.querySelector(".popover"), ref.current, { up, align });
    fit();
    window.addEventListener("resize", fit);
    return () => window.removeEventListener("resize", fit);
  }, [open]);
  useEffect(() => {
    if (!open) return undefined;
    const away = (event) => !ref.current.contains(event.target) && set(false);
    document.addEventListener("pointerdown", away);
    ref.current.querySelector(".popover input, .popover select, .popover textarea, .popover button")?.focus();
    return () => document.removeEventListener("pointerdown", away);
  }, [open]);
  const close = () => {
    set(false);
    ref.current.querySelector("button").focus();
  };
  const keys = (event) => {
    if (event.key !== "Escape" || !open) return;
    event.stopPropagation();
    close();
  };
  return html`<div class="popover-frame" ref=${ref} onKeyDown=${keys}>
    <${Button} icon=${icon} label=${label} kind=${kind} aria-expanded=${open} aria-haspopup="dialog" onClick=${() => set(!open)}
      >${text}<//
    >
    ${open && html`<div class="popover" role="dialog" aria-label=${label}>${children(close)}</div>`}
  </div>`;
}

/** A table without anything that the keyboard reaches: it can be scrolled by it, where the screen is narrow. */
export const Scrolled = ({ label, children }) => html`<div class="table-frame" tabindex="0" role="region" aria-label=${label}>${children}</div>`;

export const Field = ({ label, hint, children }) => html`<label class="field">
  <span>${label}</span>${children}${hint && html`<small class="faint">${hint}</small>`}
</label>`;

/** JSON with its parts in colour. Long texts are cut; the copy button has all. */
export function Json({ value, label = "JSON" }) {
  const text = typeof value === "string" ? pretty(value) : JSON.stringify(value, null, 2) ?? "";
  const shown = text.length > 40_000 ? `${text.slice(0, 40_000)}\n… ${number(text.length - 40_000)} characters more` : text;
  return html`<div class="json">
    <${Copy} text=${text} label=${`Copy ${label}`} />
    <pre tabindex="0" role="region" aria-label=${label}>${coloured(shown)}</pre>
  </div>`;
}

export function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}

const TOKENS = /("(?:[^"\\]|\\.)*")(\s*:)?|\b(true|false|null)\b|-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?/g;

function coloured(text) {
  if (text.length > 20_000) return text;
  const found = [];
  let at = 0;
  for (const match of text.matchAll(TOKENS)) {
    if (match.index > at) found.push(text.slice(at, match.index));
    const kind = match[2] ? "name" : match[1] ? "text" : match[3] ? "word" : "number";
    found.push(html`<span class=${`j-${kind}`}>${match[1] ?? match[0]}</span>`);
    if (match[2]) found.push(match[2]);
    at = match.index + match[0].length;
  }
  found.push(text.slice(at));
  return found;
}

export const isNarrow = () => window.matchMedia("(max-width: 819px)").matches;
