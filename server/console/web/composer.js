// What is said next: the text, its attachments, the model, its tools and how it is to answer.

import { html, useEffect, useLayoutEffect, useMemo, useRef, useState } from "./vendor/standalone.module.js";
import { connection, get, key, list, upload } from "./api.js";
import { Button, Field, Icon, More, Popover, droppedFiles, fileName, size } from "./elements.js";
import { changeFiles, draftOf } from "./outbox.js";
import { kept, notify, useChanged, useList, useLoaded, useWatched } from "./state.js";

const TOOL_WAIT_S = 24 * 3600; // as long as a response may wait for somebody

const STORES_MS = 10_000; // between two looks at which stores there are, while they are to be searched
const MODELS_MS = 10_000; // between two looks at which models are loaded, besides those at the begin and end of a turn
const MARKS = { unloaded: " (not loaded)", waiting: " (loading)", loading: " (loading)", failed: " (failed to load)" };

const NAMES = { web_search: "Web search", file_search: "File search", code_interpreter: "Python", image_generation: "Images" };

const chosen = kept("settings", {});

/** How the next turn is to be made: {value, body()}, and what changes it. Kept for this tab. */
export function useSettings() {
  const [value, keep] = useChanged(chosen);
  const settings = useMemo(() => ({ value, body: () => bodyOf(value) }), [value]);
  return [settings, keep];
}

function bodyOf(value) {
  const body = { model: value.model };
  if (value.instructions?.trim()) body.instructions = value.instructions;
  if (value.effort) body.reasoning = { effort: value.effort };
  for (const name of ["temperature", "max_output_tokens"]) {
    if (value[name] !== undefined && value[name] !== "") body[name] = Number(value[name]);
  }
  const tools = [...(value.tools ?? []).map((tool) => prepared(tool, value)), ...functionsOf(value.functions).tools];
  if (tools.length) Object.assign(body, { tools, await_tool_outputs: true, tool_timeout_s: TOOL_WAIT_S });
  return body;
}

function prepared(tool, value) {
  if (tool.type === "mcp") return { ...tool, require_approval: value.ask ? "always" : "never" };
  if (tool.type === "file_search") return { ...tool, vector_store_ids: value.stores ?? [] };
  return tool;
}

/** The functions that somebody wrote as JSON: {tools, error}. */
function functionsOf(text) {
  if (!text?.trim()) return { tools: [], error: null };
  try {
    const given = JSON.parse(text);
    const tools = (Array.isArray(given) ? given : [given]).map((tool) => ({ type: "function", strict: false, ...tool }));
    if (tools.every((tool) => tool.name)) return { tools, error: null };
    return { tools: [], error: "Every function needs a name." };
  } catch (error) {
    return { tools: [], error: `This is no JSON: ${error.message.replace(/\.$/, "")}.` };
  }
}

/** Why nothing can be sent with these settings, or null. */
function brokenOf({ functions, tools = [], stores = [] }) {
  const { error } = functionsOf(functions);
  if (error) return `The functions under Tools cannot be sent. ${error}`;
  const searches = tools.some((tool) => tool.type === "file_search");
  return searches && !stores.length ? "File search has nothing to search. Choose a store under Tools." : null;
}

/** Whether a key that was pressed where one writes sends what stands there: Enter, without Shift. */
export const isSending = (event) => event.key === "Enter" && !event.shiftKey && !event.isComposing;

/** unsent: whether what was said last is still on its way. send: takes what is written. disabled: why nothing can be written,
 * if it cannot. */
export function Composer({ id, send, unsent, working, waiting, stop, canStop, disabled, settings, keep }) {
  const draft = draftOf(id);
  const [text, setText] = useChanged(draft.text);
  const [files, setFiles] = useChanged(draft.files);
  const [over, setOver] = useState(false);
  const [hinted, hint] = useState(false); // Enter was pressed where nothing can be sent
  const area = useRef();
  const picker = useRef();
  const owner = useWatched(key);
  const away = useWatched(connection) !== "online";
  const models = useLoaded(async () => (await get("v1/models")).data.filter(generates), [owner], MODELS_MS);

  useEffect(() => {
    const names = models.value?.map((each) => each.id);
    if (names?.length && !names.includes(settings.value.model)) keep((before) => ({ ...before, model: names[0] }));
  }, [models.value]);
  const unlisted = models.error?.status === 403;
  useEffect(() => {
    if (unlisted) keep(({ model: _, ...rest }) => rest); // it was chosen with another key
  }, [unlisted]);
  useEffect(() => {
    if (models.value) models.reload(); // a turn may load a model, or find that it cannot be loaded
  }, [working, canStop]);
  // Before it is painted: what is typed while a first message goes on in its conversation is lost otherwise.
  useLayoutEffect(() => {
    if (window.matchMedia("(min-width: 820px)").matches && document.activeElement.id !== "main") area.current.focus();
  }, []);

  const attach = async (chosen) => {
    for (const file of chosen) {
      const entry = { name: file.name, bytes: file.size, image: file.type.startsWith("image/"), id: null };
      setFiles((before) => [...before, entry]);
      try {
        entry.id = (await upload(file)).id;
        changeFiles(entry, (now) => [...now]);
      } catch (error) {
        notify(`${fileName(file.name)}: ${error.message}`, "error");
        changeFiles(entry, (now) => now.filter((each) => each !== entry));
      }
    }
  };
  const broken = brokenOf(settings.value);
  let why = null; // nothing can be sent now
  if (waiting) why = "The answer waits for you, above. Send this when it has ended.";
  else if (unsent && away) why = "This is sent as soon as the server can be reached.";
  else if (working) why = "An answer is being made. Send this when it has ended, or stop it.";
  else if (files.some((file) => !file.id)) why = "A file is still being uploaded.";
  const ready = (text.trim() || files.length) && !why && !broken && !disabled;
  useEffect(() => hint(unsent && away), [why, text]);
  const submit = async (event) => {
    event?.preventDefault();
    if (!ready) return hint(true);
    await send({ text, files });
    if (document.activeElement === document.body) area.current?.focus();
  };
  const keys = (event) => {
    if (isSending(event)) submit(event);
    if (event.key === "Escape") area.current.blur();
  };
  const dropped = (event) => {
    event.preventDefault();
    setOver(false);
    attach(droppedFiles(event.dataTransfer));
  };
  const pasted = (event) => {
    const { files: copied, types } = event.clipboardData;
    if (!copied.length || types.includes("text/plain")) return; // beside a text it is an image of that text
    event.preventDefault();
    attach([...copied]);
  };
  const change = (name, value) => keep((before) => ({ ...before, [name]: value }));
  return html`<form
    class=${`composer ${over ? "over" : ""}`}
    aria-label="Message"
    onSubmit=${submit}
    onDragOver=${(event) => (event.preventDefault(), setOver(true))}
    onDragLeave=${() => setOver(false)}
    onDrop=${dropped}
  >
    ${files.length > 0 &&
    html`<ul class="attached" aria-label="Attachments">
      ${files.map((file) => html`<li class="chip">
        <${Icon} name="file" /><span class="clip">${fileName(file.name)}</span><small class="faint">${file.id ? size(file.bytes) : "uploading…"}</small>
        <${Button} icon="close" kind="quiet" label=${`Take ${fileName(file.name)} away`} onClick=${() => setFiles(files.filter((each) => each !== file))} />
      </li>`)}
    </ul>`}
    <textarea
      ref=${area}
      id="composer"
      rows="1"
      aria-label="Message"
      placeholder=${disabled || "Message"}
      disabled=${Boolean(disabled)}
      value=${text}
      onInput=${(event) => setText(event.target.value)}
      onKeyDown=${keys}
      onPaste=${pasted}
    ></textarea>
    <div role="status">
      ${broken ? html`<p class="composer-note bad-text">${broken}</p>` : hinted && why && html`<p class="composer-note faint">${why}</p>`}
    </div>
    <div class="composer-bar">
      <input ref=${picker} type="file" multiple hidden onChange=${(event) => (attach([...event.target.files]), (event.target.value = ""))} />
      <${Button} icon="clip" kind="quiet" label="Attach files" onClick=${() => picker.current.click()} />
      <${Tools} value=${settings.value} change=${change} />
      <${Options} value=${settings.value} change=${change} />
      <label class="model"><span class="out-of-sight">Model</span>
        <select value=${settings.value.model} disabled=${unlisted} title=${unlisted ? models.error.message : undefined} onChange=${(event) => change("model", event.target.value)}>
          ${unlisted && html`<option>the server's default: this key may not list models</option>`}
          ${(models.value ?? []).map((each) => html`<option value=${each.id} selected=${each.id === settings.value.model}>${each.id}${MARKS[each.state] ?? ""}</option>`)}
        </select></label>
      <span class="grow"></span>
      ${working
        ? html`<button key="stop" type="button" class="button round" aria-label="Stop" title="Stop" disabled=${!canStop} onClick=${stop}>
          <${Icon} name="stop" /></button>`
        : html`<button key="send" type="submit" class="button round primary" aria-label="Send" title="Send (Enter)" disabled=${!ready}>
          <${Icon} name="send" /></button>`}
    </div>
  </form>`;
}

/** Whether a model answers messages under its own name: another name of a model has that one as its root. */
const generates = ({ used_for: use, parent, root, id }) => !use && (parent || !root || root === id);

const SAID = { "builtin:": "What this server brings along: a calculator, notes, and tools of its operator." };
const labelOf = (tool) => (tool.type === "mcp" ? (tool.server_label === "builtin" ? "Built-in tools" : tool.server_label) : NAMES[tool.type] ?? tool.type);
const same = (one, other) => one.type === other.type && one.server_url === other.server_url;

function Tools({ value, change }) {
  const owner = useWatched(key);
  const offered = useLoaded(async () => (await get("v1/tools")).data, [owner]);
  const chosen = value.tools ?? [];
  const searches = chosen.some((tool) => tool.type === "file_search");
  const ticked = value.stores ?? [];
  const stores = useList((most) => (searches ? list("v1/vector_stores", {}, most) : null), [owner, searches], searches ? STORES_MS : 0);
  const listed = stores.value?.data ?? [];
  const unlisted = stores.value ? ticked.filter((id) => !listed.some((store) => store.id === id)) : []; // deleted, unless more can be listed
  useEffect(() => {
    if (stores.value && !stores.value.has_more && unlisted.length) change("stores", ticked.filter((id) => !unlisted.includes(id)));
  }, [stores.value]);
  const { tools: functions, error } = functionsOf(value.functions);
  const toggle = (tool) =>
    change("tools", chosen.some((each) => same(each, tool)) ? chosen.filter((each) => !same(each, tool)) : [...chosen, tool]);
  const count = chosen.length + functions.length;
  const flip = (id) => change("stores", ticked.includes(id) ? ticked.filter((each) => each !== id) : [...ticked, id]);
  return html`<${Popover} icon="tool" label="Tools" text=${count ? String(count) : null} up>
    ${() => html`<h2>Tools</h2>
      ${(offered.value ?? []).map(
        ({ tool, available, reason }) => html`<label class="check" title=${reason}>
          <input type="checkbox" disabled=${!available} checked=${chosen.some((each) => same(each, tool))} onChange=${() => toggle(tool)} />
          <span>${labelOf(tool)}<small class="faint block">${available ? SAID[tool.server_url] : reason}</small></span>
        </label>`,
      )}
      ${searches &&
      html`<fieldset><legend>Stores to search</legend>
        ${[...listed, ...unlisted.map((id) => ({ id }))].map((store) => html`<label class="check">
          <input type="checkbox" checked=${ticked.includes(store.id)} onChange=${() => flip(store.id)} />
            <span>${store.name || store.id}</span>
        </label>`)}
        ${stores.value?.data.length === 0 && html`<small class="faint">There is none yet.</small>`}
        <${More} of=${stores} />
      </fieldset>`}
      <label class="check">
        <input type="checkbox" checked=${Boolean(value.ask)} onChange=${(event) => change("ask", event.target.checked)} />
        <span>Ask me before each call of a server's tool</span></label>
      <${Field} label="Functions that you answer" hint=${error ?? "JSON: one function, or a list. The answer waits for what you say a call gave."}>
        <textarea rows="4" class="mono" spellcheck="false" value=${value.functions ?? ""} aria-invalid=${Boolean(error)} onInput=${(event) => change("functions", event.target.value)}
          placeholder='{"name": "get_weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}'>
            </textarea>
      <//>`}
  <//>`;
}

function Options({ value, change }) {
  const set = [value.instructions, value.effort, value.temperature, value.max_output_tokens].filter(Boolean).length;
  return html`<${Popover} icon="sliders" label="How to answer" text=${set ? String(set) : null} up>
    ${() => html`<h2>How to answer</h2>
      <${Field} label="Instructions">
        <textarea rows="3" value=${value.instructions ?? ""} onInput=${(event) => change("instructions", event.target.value)}>
          </textarea>
      <//>
      <${Field} label="Reasoning">
        <select onChange=${(event) => change("effort", event.target.value)}>
          ${["", "none", "minimal", "low", "medium", "high"].map((each) => html`<option value=${each} selected=${(value.effort ?? "") === each}>${each || "as the model has it"}</option>`)}
        </select>
      <//>
      <div class="pair">
        <${Field} label="Temperature">
          <input type="number" min="0" max="2" step="0.1" value=${value.temperature ?? ""} onInput=${(event) => change("temperature", event.target.value)} />
          <//>
        <${Field} label="Tokens at most">
          <input type="number" min="16" step="1" value=${value.max_output_tokens ?? ""} onInput=${(event) => change("max_output_tokens", event.target.value)} />
          <//>
      </div>`}
  <//>`;
}
