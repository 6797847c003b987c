// The frame around all pages: navigation, the state of the connection, the key, shortcuts, notices.

import { html, render, useEffect, useErrorBoundary, useRef, useState } from "./vendor/standalone.module.js";
import { connection, get, key, refused, useKey, watched } from "./api.js";
import { Button, Dialog, Field, Icon, Page } from "./elements.js";
import { sendAgain } from "./outbox.js";
import { dialog, dismiss, go, href, notices, route, useLoaded, useWatched } from "./state.js";
import { Palette, useShortcuts } from "./palette.js";
import { Chat } from "./pages/chat.js";
import { Containers } from "./pages/containers.js";
import { Conversations } from "./pages/conversations.js";
import { Engine } from "./pages/engine.js";
import { Files } from "./pages/files.js";
import { Keys } from "./pages/keys.js";
import { Run } from "./pages/run.js";
import { Runs } from "./pages/runs.js";
import { Stores } from "./pages/stores.js";
import { Usage } from "./pages/usage.js";
import { Waiting } from "./pages/waiting.js";

const WAITING_MS = 5000;
const WRITING_MS = 10_000; // as long as who has written something may still be at it
const COUNTED = 9; // of those that wait: each comes whole
const FIND = /Mac|iPhone|iPad/.test(navigator.platform) ? "⌘K" : "Ctrl K";
const KEY = /^[!-~]+$/; // what a header can carry as it is
const NEEDED = "This server needs a key.";

/** Every page: its name in the address, what it is called, its icon, the letter behind `g`, what shows it. */
export const PAGES = [
  { name: "chat", title: "Chat", icon: "chat", letter: "c", group: "Talk", view: Chat },
  { name: "waiting", title: "Waiting", icon: "waiting", letter: "w", group: "Talk", view: Waiting },
  { name: "conversations", title: "Conversations", icon: "tree", letter: "t", group: "Talk", view: Conversations },
  { name: "runs", title: "Runs", icon: "runs", letter: "r", group: "Talk", view: ({ id }) => (id ? html`<${Run} key=${id} id=${id} />` : html`<${Runs} />`) },
  { name: "files", title: "Files", icon: "file", letter: "f", group: "Data", view: Files },
  { name: "stores", title: "Vector stores", icon: "store", letter: "v", group: "Data", view: Stores },
  { name: "containers", title: "Containers", icon: "box", letter: "b", group: "Data", view: Containers },
  { name: "usage", title: "Usage", icon: "usage", letter: "u", group: "Server", view: Usage },
  { name: "keys", title: "Keys", icon: "key", letter: "k", group: "Server", view: Keys },
  { name: "engine", title: "Engine", icon: "engine", letter: "e", group: "Server", view: Engine },
];

const NOWHERE = {
  title: "Not found",
  view: () => html`<${Page} title="There is no such page."><p><a href="#/chat">To the chat</a></p><//>`,
};

function App() {
  const at = useWatched(route);
  const state = useWatched(connection);
  const denied = useWatched(refused);
  const owner = useWatched(key);
  const [menu, setMenu] = useState(false);
  const written = useRef(0); // when somebody last wrote something
  const shown = useWatched(dialog);
  const open = dialog.set;
  const page = PAGES.find((each) => each.name === at.page) ?? NOWHERE;
  const commands = commandsOf({ open });
  useShortcuts({
    palette: () => open("palette"),
    help: () => open("help"),
    pages: PAGES,
  });
  useEffect(() => {
    setMenu(false);
    document.title = `${page.title} · Antiphon`;
  }, [at.page, at.id]);
  useEffect(() => {
    // The dialog would take the rest of what is being written, so that then the banner tells it.
    if (denied && Date.now() - written.current > WRITING_MS) open("key");
  }, [denied]);
  useEffect(() => {
    const pressed = (event) => event.key === "Escape" && setMenu(false);
    const wrote = (event) => event.target.closest("main") && (written.current = Date.now());
    document.addEventListener("keydown", pressed);
    document.addEventListener("input", wrote);
    return () => {
      document.removeEventListener("keydown", pressed);
      document.removeEventListener("input", wrote);
    };
  }, []);
  const close = () => open(null);
  return html`<div class=${`shell ${menu ? "menu-open" : ""}`}>
    <a class="skip" href="#main" onClick=${(event) => (event.preventDefault(), document.querySelector("main").focus())}>To the content</a>
    <header class="top">
      <${Button} icon="menu" kind="quiet" label="Menu" aria-expanded=${menu} onClick=${() => setMenu(!menu)} />
      <a class="brand" href="#/chat"><img src="console/icon.svg" alt="" width="20" height="20" /><span>Antiphon</span>
        </a>
      <${Connection} state=${state} />
    </header>
    <${Navigation} current=${page.name} state=${state} open=${open} />
    ${menu && html`<div class="shade" onClick=${() => setMenu(false)}></div>`}
    <main tabindex="-1" id="main">
      ${state !== "online" && html`<div class="banner" role="status">${AWAY[state]}</div>`}
      ${denied && !shown && html`<div class="banner" role="status">${owner ? denied : NEEDED} <${Button} icon="key" onClick=${() => open("key")}>Use a key<//></div>`}
      <${Bounded} key=${page.name} view=${page.view} id=${at.id} query=${at.query} />
    </main>
    <${Notices} />
    ${shown === "key" && html`<${KeyDialog} close=${close} why=${denied} />`}
    ${shown === "help" && html`<${Help} close=${close} />`}
    ${shown === "palette" && html`<${Palette} close=${close} commands=${commands} />`}
  </div>`;
}

/** A page, or that it has failed: an error in one must not stop what is around it. */
function Bounded({ view, id, query }) {
  const [error, again] = useErrorBoundary((met) => console.error(met));
  useEffect(() => error && again(), [id]);
  if (!error) return html`<${view} id=${id} query=${query} />`;
  return html`<${Page} title="This page has failed." actions=${html`<${Button} onClick=${again}>Try again<//>`}>
    <p class="notice bad" role="alert">${String(error)}</p>
  <//>`;
}

const commandsOf = ({ open }) => [
  { title: "New chat", icon: "plus", run: () => go("chat") },
  ...PAGES.map((page) => ({ title: `Go to ${page.title}`, icon: page.icon, hint: `g ${page.letter}`, run: () => go(page.name) })),
  { title: "Use a key", icon: "key", run: () => setTimeout(() => open("key")) },
  { title: "Light, dark or as the system", icon: "sun", run: () => nextTheme() },
  { title: "Shortcuts", icon: "thought", hint: "?", run: () => setTimeout(() => open("help")) },
];

function Navigation({ current, state, open }) {
  const owner = useWatched(key);
  const version = useLoaded(() => get("version"), []);
  const waiting = useLoaded(() => get("v1/responses", { status: "waiting", limit: COUNTED }), [owner], WAITING_MS);
  const { data: found, has_more: more } = waiting.value ?? { data: [] };
  const count = `${found.length}${more ? "+" : ""}`;
  return html`<nav class="nav" aria-label="Pages">
    <a class="brand" href="#/chat"><img src="console/icon.svg" alt="" width="22" height="22" /><span>Antiphon</span></a>
    <button type="button" class="find" onClick=${() => open("palette")}><${Icon} name="search" /><span>Find</span>
      <kbd>${FIND}</kbd></button>
    ${["Talk", "Data", "Server"].map((group) => html`<section aria-labelledby=${`nav-${group}`}>
      <h2 id=${`nav-${group}`}>${group}</h2>
      <ul>
        ${PAGES.filter((page) => page.group === group).map((page) => html`<li>
          <a href=${href(page.name)} aria-current=${page.name === current ? "page" : undefined}>
            <${Icon} name=${page.icon} /><span>${page.title}</span>
            ${page.name === "waiting" && found.length > 0 && html`<b class="count" aria-label=${`${count} waiting`}>${count}</b>`}
          </a>
        </li>`)}
      </ul>
    </section>`)}
    <div class="nav-foot">
      <${Connection} state=${state} />
      <div>
        <${Theme} />
        <${Button} icon="key" kind="quiet" label=${owner ? "Another key" : "Use a key"} onClick=${() => open("key")} />
        <${Button} kind="quiet" aria-label="Shortcuts" onClick=${() => open("help")}>?<//>
      </div>
      ${version.value && html`<a class="faint version" href="docs" target="_blank" rel="noopener">${version.value.version} · API</a>`}
    </div>
  </nav>`;
}

const WORDS = { online: "Connected", offline: "Reconnecting", starting: "Starting", ending: "Ending" };
const BACK = "Everything goes on by itself when it is back.";
const AWAY = { offline: `The server cannot be reached. ${BACK}`, starting: "The server is starting.", ending: `The server is ending. ${BACK}` };
const Connection = ({ state }) => html`<span class=${`connection ${state}`} role="status"><i aria-hidden="true">
  </i>${WORDS[state]}</span>`;

// --- the look

const THEMES = ["auto", "light", "dark"];
const theme = watched(localStorage.getItem("antiphon.theme") || "auto");

function applyTheme(theme) {
  if (theme === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
}

function nextTheme() {
  const next = THEMES[(THEMES.indexOf(theme.get()) + 1) % THEMES.length];
  localStorage.setItem("antiphon.theme", next);
  applyTheme(next);
  theme.set(next);
}

function Theme() {
  const now = useWatched(theme);
  const icons = { auto: "auto", light: "sun", dark: "moon" };
  return html`<${Button} icon=${icons[now]} kind="quiet" label=${`Colours: ${now === "auto" ? "as the system" : now}`} onClick=${nextTheme} />`;
}

// --- dialogs

function KeyDialog({ close, why }) {
  const [value, setValue] = useState("");
  const [problem, setProblem] = useState(key.get() ? why : null);
  const submit = async (event) => {
    event.preventDefault();
    const given = value.trim();
    if (!KEY.test(given)) return setProblem("A key consists of plain letters, digits and signs. This holds something else.");
    let owner = null;
    try {
      ({ owner } = await get("v1/tools", {}, { as: given }));
    } catch (error) {
      // A key that may not make responses is a good key all the same.
      if (error.status !== 403) return setProblem(error.message);
    }
    useKey(given, owner);
    close();
  };
  const hint = "Kept in this tab alone, until it is closed.";
  return html`<${Dialog} title="Key" close=${close}>
    <form onSubmit=${submit}>
      ${problem ? html`<p class="notice bad" role="alert">${problem}</p>` : why && html`<p>${NEEDED}</p>`}
      <${Field} label="API key" hint=${key.get() ? `${hint} Drafts and open pages stay if it is of the same owner, and go otherwise.` : hint}>
        <input type="password" autocomplete="off" spellcheck="false" value=${value} onInput=${(event) => setValue(event.target.value)} />
      <//>
      <footer>
        ${key.get() && html`<${Button} small=${false} onClick=${() => (useKey(""), close())}>Forget the key<//>`}
        <button type="submit" class="button primary" disabled=${!value.trim()}>Use it</button>
      </footer>
    </form>
  <//>`;
}

function Help({ close }) {
  const rows = [
    [FIND, "Find a page or a command"],
    ["n", "New chat"],
    ["/", "Write a message"],
    ...PAGES.map((page) => [`g ${page.letter}`, page.title]),
    ["Enter", "Send"],
    ["Shift Enter", "A new line"],
    ["Esc", "Close what is open, or leave the message"],
  ];
  return html`<${Dialog} title="Shortcuts" close=${close}>
    <table class="shortcuts"><tbody>${rows.map(([keys, what]) => html`<tr><th scope="row"><kbd>${keys}</kbd></th>
      <td>${what}</td></tr>`)}</tbody></table>
  <//>`;
}

function Notices() {
  const found = useWatched(notices);
  return html`<div class="notices" role="status" aria-live="polite">
    ${found.map((notice) => html`<div key=${notice.id} class=${`toast ${notice.kind}`}>
      <span>${notice.text}</span>
        <${Button} icon="close" kind="quiet" label="Close" onClick=${() => dismiss(notice.id)} />
    </div>`)}
  </div>`;
}

applyTheme(theme.get());
sendAgain();
render(html`<${App} />`, document.getElementById("app"));
