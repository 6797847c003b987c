// The keyboard: shortcuts of one or two letters, and a list of commands that is searched.

import { html, useEffect, useMemo, useRef, useState } from "./vendor/standalone.module.js";
import { list } from "./api.js";
import { Dialog, Icon } from "./elements.js";
import { go, useList } from "./state.js";
import { called } from "./title.js";

const SHOWN = 40; // commands at once
const SECOND_MS = 1200; // for the letter behind a `g`

const writes = (element) => element?.closest?.("input, textarea, select, [contenteditable], dialog");

/** Listen to the keyboard as long as the component is there. */
export function useShortcuts({ palette, help, pages }) {
  const began = useRef(0);
  useEffect(() => {
    const pressed = (event) => {
      if ((event.metaKey || event.ctrlKey) && event.key.toLowerCase() === "k") {
        event.preventDefault();
        if (!document.querySelector("dialog[open]")) palette();
        return;
      }
      if (event.metaKey || event.ctrlKey || event.altKey || writes(event.target)) return;
      // A letter goes to an edit that is open, where a shortcut would throw the edit away.
      const unsent = /^[a-z/?]$/.test(event.key) && document.querySelector("[data-unsent]");
      if (unsent) return unsent.focus();
      const page = Date.now() - began.current < SECOND_MS && pages.find((each) => each.letter === event.key);
      began.current = event.key === "g" && !page ? Date.now() : 0;
      if (page) {
        go(page.name);
        document.getElementById("main").focus(); // what is pressed next is a shortcut, too
      } else if (event.key === "?") help();
      else if (event.key === "n") {
        document.activeElement.blur();
        document.getElementById("composer")?.focus();
        go("chat");
      }
      else if (event.key === "/") document.querySelector("#composer, input[type=search]")?.focus();
      else return;
      event.preventDefault();
    };
    document.addEventListener("keydown", pressed);
    return () => document.removeEventListener("keydown", pressed);
  });
}

/** Commands and conversations, by what is typed. */
export function Palette({ close, commands }) {
  const [text, setText] = useState("");
  const [at, setAt] = useState(0);
  const box = useRef();
  const talks = useList((most) => list("v1/conversations", {}, most), []);
  const found = useMemo(() => {
    const words = text.toLowerCase().trim();
    if (/^resp_\w+$/.test(words)) return [{ title: `Open run ${words}`, icon: "runs", run: () => go("runs", words) }];
    if (/^conv_\w+$/.test(words)) return [{ title: `Open ${words}`, icon: "chat", run: () => go("chat", words) }];
    const opened = (talks.value?.data ?? []).map((each) => ({
      title: called(each),
      icon: each.forked_from ? "fork" : "chat",
      hint: each.forked_from ? "fork" : undefined,
      run: () => go("chat", each.id),
    }));
    const shown = [...commands, ...opened].filter((each) => each.title.toLowerCase().includes(words)).slice(0, SHOWN);
    const older = { title: "Search older conversations", icon: "search", stays: true, run: talks.more };
    return talks.value?.has_more && shown.length < SHOWN ? [...shown, older] : shown;
  }, [text, talks.value]);
  useEffect(() => setAt(0), [text]);
  useEffect(() => box.current?.children[at]?.scrollIntoView({ block: "nearest" }), [at]);
  const run = (command) => {
    if (!command?.stays) close();
    command?.run();
  };
  const keys = (event) => {
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (step) {
      event.preventDefault();
      setAt((at + step + found.length) % Math.max(found.length, 1));
    }
    if (event.key === "Enter") {
      event.preventDefault();
      run(found[at]);
    }
  };
  return html`<${Dialog} label="Commands" close=${close}>
    <input
      class="palette-input"
      role="combobox"
      aria-expanded="true"
      aria-controls="palette"
      aria-activedescendant=${found.length ? `command-${at}` : undefined}
      aria-label="Find a page, a command or a conversation"
      placeholder="Find a page, a command, a conversation, an id"
      value=${text}
      onInput=${(event) => setText(event.target.value)}
      onKeyDown=${keys}
    />
    <ul id="palette" class="palette" role="listbox" aria-label="Commands" ref=${box}>
      ${found.map((each, index) => html`<li
        key=${index}
        id=${`command-${index}`}
        role="option"
        aria-selected=${index === at}
        onMouseMove=${() => setAt(index)}
        onClick=${() => run(each)}
      >
        <${Icon} name=${each.icon} />
          <span class="clip" dir="auto">${each.title}</span>${each.hint && html`<kbd>${each.hint}</kbd>`}
      </li>`)}
      ${!found.length && html`<li class="faint" role="option" aria-selected="false" aria-disabled="true">Nothing of that name.</li>`}
    </ul>
  <//>`;
}
