// How an item of a response or a conversation looks: messages, thoughts, calls and their outputs, approvals.

import { html, useEffect, useState } from "./vendor/standalone.module.js";
import { download, get } from "./api.js";
import { Markdown } from "./markdown.js";
import { Icon, Json, State, fileName, pretty } from "./elements.js";
import { Approval, Answer } from "./answers.js";
import { isOutput, textOf } from "./fold.js";
import { attempt } from "./state.js";

const NAMES = {
  web_search_call: "Web search",
  file_search_call: "File search",
  code_interpreter_call: "Python",
  image_generation_call: "Image",
  shell_call: "Shell",
  local_shell_call: "Shell",
  apply_patch_call: "Patch",
  computer_call: "Computer",
  tool_search_call: "Tool search",
};

const keyOf = (item) => item.call_id ?? item.approval_request_id;

/** The outputs among items, by the call that each answers. */
export const outputsOf = (items) =>
  Object.fromEntries(items.filter((item) => item && isOutput(item)).map((item) => [keyOf(item), item]));

/** The items that have a card of their own: an output stands in its call's, and an approval in that of the call which
 * was made upon it. */
export function withCards(items) {
  const made = new Set(items.map((item) => item?.type === "mcp_call" && item.approval_request_id));
  return items.filter((item) => item && !isOutput(item) && !made.has(item.id));
}

export const nameOf = (item) => item.name ?? NAMES[item.type] ?? item.type.replaceAll("_", " ");

/** One item. outputs: see `outputsOf`. pending: the ids of calls that wait, and `answer(outputs)` what sends one. given: the
 * ids of those that are answered without an output among the items. busy: the response is still being made. */
export function Item({ item, outputs = {}, pending, given, answer, tools, busy }) {
  switch (item.type) {
    case "message":
      return html`<${Message} item=${item} />`;
    case "reasoning":
      return html`<${Thought} item=${item} busy=${busy} />`;
    case "mcp_list_tools":
      return html`<${Listing} item=${item} />`;
    case "mcp_approval_request":
      return html`<${Approval}
        item=${item}
        answered=${outputs[item.id]}
        open=${pending?.has(item.id)}
        given=${given?.has(item.id)}
        answer=${answer}
      />`;
    case "compaction":
      return html`<div class="aside">Earlier turns were made shorter here.</div>`;
    default:
      if (isOutput(item)) return null;
      return html`<${Call}
        item=${item}
        output=${outputs[item.call_id]}
        open=${pending?.has(item.call_id)}
        given=${given?.has(item.call_id)}
        answer=${answer}
        tools=${tools}
      />`;
  }
}

function Message({ item }) {
  const parts = typeof item.content === "string" ? [{ type: "output_text", text: item.content }] : item.content ?? [];
  return html`${parts.map((part, index) => html`<${Part} key=${index} part=${part} role=${item.role} />`)}`;
}

function Part({ part, role }) {
  if (!part) return null;
  if (part.type === "input_file") return html`<${Attached} part=${part} />`;
  if (part.type === "input_image") return html`<${Picture} part=${part} />`;
  if (part.type === "refusal") return html`<div class="notice bad">${part.refusal}</div>`;
  if (role === "user") return html`<div class="said">${part.text}</div>`;
  return html`<${Markdown} text=${part.text ?? ""} />
    ${part.annotations?.length > 0 && html`<${Sources} annotations=${part.annotations} />`}`;
}

function Picture({ part }) {
  if (part.image_url?.startsWith("data:image/")) return html`<img class="picture" src=${part.image_url} alt="Attached image" />`;
  return html`<${Attached} part=${part} />`;
}

const files = new Map(); // id -> what the server says of a file, asked once

/** A file that is named by its id, with its name as soon as that is known. */
function Attached({ part }) {
  const id = part.file_id;
  const path = `v1/files/${encodeURIComponent(id)}`;
  const [name, setName] = useState(part.filename ?? id ?? part.file_url ?? part.image_url ?? "file");
  useEffect(() => {
    if (!id || part.filename) return;
    if (!files.has(id)) files.set(id, get(path).catch(() => null));
    files.get(id).then((file) => file && setName(file.filename));
  }, [id]);
  if (!id) return html`<span class="chip"><${Icon} name="file" /><span class="clip">${fileName(name)}</span></span>`;
  const save = () => attempt(() => download(`${path}/content`, name));
  return html`<button type="button" class="chip" title="Download" onClick=${save}>
    <${Icon} name="file" /><span class="clip">${fileName(name)}</span></button>`;
}

function Sources({ annotations }) {
  const seen = new Map();
  for (const each of annotations) seen.set(each.url ?? each.file_id ?? JSON.stringify(each), each);
  return html`<ul class="sources" aria-label="Sources">
    ${[...seen.values()].map((each) => {
      const name = each.title ?? each.filename ?? each.url ?? each.file_id;
      if (/^https?:\/\//.test(each.url ?? "")) {
        return html`<li><a class="chip" href=${each.url} target="_blank" rel="noopener noreferrer nofollow">
          <span class="clip">${name}</span></a>
          </li>`;
      }
      if (each.type === "container_file_citation") {
        const [container, file] = [each.container_id, each.file_id].map(encodeURIComponent);
        const path = `v1/containers/${container}/files/${file}/content`;
        return html`<li><button type="button" class="chip" onClick=${() => attempt(() => download(path, name))}>
          <${Icon} name="save" /><span class="clip">${fileName(name)}</span></button></li>`;
      }
      return html`<li><span class="chip"><${Icon} name="file" /><span class="clip">${fileName(name)}</span></span></li>`;
    })}
  </ul>`;
}

function Thought({ item, busy }) {
  const text = textOf(item);
  const going = busy && item.status !== "completed";
  if (!text) return going ? html`<div class="aside"><${Icon} name="thought" />Thinking…</div>` : null;
  return html`<details class="fold thought">
    <summary>
      <${Icon} name="thought" />${going ? "Thinking…" : "Thought"}<span class="faint clip">${text.slice(0, 120)}</span>
      </summary>
    <${Markdown} text=${text} />
  </details>`;
}

function Listing({ item }) {
  const names = (item.tools ?? []).map((tool) => tool.name);
  return html`<details class="fold slight">
    <summary>
      <${Icon} name="tool" />${item.error ? "Could not list the tools of" : "Tools of"} ${item.server_label}</summary>
    ${item.error
      ? html`<p class="notice bad">${typeof item.error === "string" ? item.error : item.error.message}</p>`
      : html`<p class="faint">${names.join(", ") || "Being listed…"}</p>`}
  </details>`;
}

const RUNNING = new Set(["in_progress", "searching", "interpreting", "generating", "calling"]);

function Call({ item, output, open, given, answer, tools }) {
  const failed = item.error || item.status === "failed";
  const state = open ? "waiting" : failed ? "failed" : RUNNING.has(item.status) ? "in_progress" : item.status ?? "completed";
  const said = item.output ?? output?.output;
  const unanswered = !open && item.type.endsWith("function_call") && !output;
  return html`<details class=${`fold call ${state}`} open=${open || item.type === "image_generation_call"}>
    <summary>
      <${Icon} name="tool" /><strong>${nameOf(item)}</strong>
      <code class="clip">${brief(item)}</code>
      ${item.approval_request_id && html`<small class="faint">approved</small>`}
      <${State} name=${unanswered && item.status === "completed" ? (given ? "answered" : "called") : state} />
    </summary>
    <div class="fold-body">
      <${Input} item=${item} />
      ${said !== undefined && said !== null && said !== "" && html`<h2>Output</h2><${Output} value=${said} />`}
      ${item.outputs?.map((each) => (each.type === "logs" ? html`<pre tabindex="0">${each.logs}</pre>` : html`<${Output} value=${each} />`))}
      ${item.results?.length > 0 && html`<h2>Results</h2><${Json} value=${item.results} label="results" />`}
      ${item.error && html`<p class="notice bad">${typeof item.error === "string" ? item.error : item.error.message ?? JSON.stringify(item.error)}</p>`}
      ${item.type === "image_generation_call" && item.result && html`<img class="picture" src=${`data:image/png;base64,${item.result}`} alt="Image by the model" />`}
      ${open && html`<${Answer} item=${item} answer=${answer} tool=${tools?.find((tool) => tool.name === item.name)} />`}
    </div>
  </details>`;
}

/** The arguments of a call in one line. */
export function brief(item) {
  const given = item.arguments ?? item.input ?? item.code ?? item.queries ?? item.action ?? item.operation ?? item.output ?? "";
  const text = typeof given === "string" ? given : JSON.stringify(given);
  return text.replace(/\s+/g, " ").slice(0, 200);
}

function Input({ item }) {
  if (item.code !== undefined) return html`<pre tabindex="0" role="region" aria-label="Code">${item.code}</pre>`;
  const given = item.arguments ?? item.input ?? item.action ?? item.operation ?? item.queries;
  if (given === undefined || given === null || given === "") return null;
  return html`<h2>Input</h2><${Json} value=${given} label="input" />`;
}

function Output({ value }) {
  if (typeof value !== "string") return html`<${Json} value=${value} label="output" />`;
  return html`<pre tabindex="0" role="region" aria-label="Output">${pretty(value).slice(0, 40_000)}</pre>`;
}

