// What a person answers to a model that waits: an approval, or the output of a tool, by a form where the tool says
// by a JSON schema what its output is.

import { html, useState } from "./vendor/standalone.module.js";
import { Button, Icon, Json, State } from "./elements.js";
import { SchemaForm, initial } from "./schema_form.js";

/** A call that waits for its approval, or how it was decided. given: it is, though not among the items. answer(outputs) sends
 * it. */
export function Approval({ item, answered, open, given, answer }) {
  const [reason, setReason] = useState("");
  const [sending, send] = useState(false);
  const decide = async (approve) => {
    send(true);
    const said = { type: "mcp_approval_response", approval_request_id: item.id, approve };
    await answer([reason && !approve ? { ...said, reason } : said]);
    send(false);
  };
  return html`<div class=${`call-card ${open ? "open" : ""}`} role="group" aria-label=${`Approval of ${item.name}`}>
    <div class="call-head">
      <${Icon} name="tool" /><strong>${item.name}</strong><span class="faint">of ${item.server_label}</span>
      ${answered ? html`<${State} name=${answered.approve ? "approved" : "declined"} />` : html`<${State} name=${open ? "waiting" : given ? "answered" : "not answered"} />`}
    </div>
    <${Arguments} text=${item.arguments} />
    ${open &&
    answer &&
    html`<div class="foot">
      <input value=${reason} onInput=${(event) => setReason(event.target.value)} aria-label="Reason, if you decline" placeholder="Reason, if you decline" />
      <${Button} disabled=${sending} onClick=${() => decide(false)}>Decline<//>
      <${Button} kind="primary" icon="check" disabled=${sending} onClick=${() => decide(true)}>Approve<//>
    </div>`}
  </div>`;
}

/** Arguments that a model wrote, one a line where they are an object. */
export function Arguments({ text }) {
  let value;
  try {
    value = JSON.parse(text);
  } catch {
    return html`<pre tabindex="0">${text}</pre>`;
  }
  const plain = value && typeof value === "object" && !Array.isArray(value);
  if (!plain || Object.values(value).some((each) => each && typeof each === "object")) return html`<${Json} value=${value} label="arguments" />`;
  return html`<dl class="arguments">
    ${Object.entries(value).map(([name, each]) => html`<div><dt>${name}</dt><dd>${String(each)}</dd></div>`)}
  </dl>`;
}

const drafts = new Map(); // {value, text} by the ids of the items that they are to answer

/** A form for the output of a call; what is written in it stays while another page is looked at. tool: as the request offered it; its `output_schema` makes the form. */
export function Answer({ item, answer, tool }) {
  const schema = tool?.output_schema ?? tool?.outputSchema ?? null;
  const [{ value, text }, setDraft] = useState(() => drafts.get(item.id) ?? { value: schema ? initial(schema) : "", text: !schema });
  const change = (next) => {
    const draft = { value, text, ...next };
    drafts.set(item.id, draft);
    setDraft(draft);
  };
  const [sending, send] = useState(false);
  const submit = async (event) => {
    event.preventDefault();
    send(true);
    await answer([{ call_id: item.call_id, output: typeof value === "string" ? value : JSON.stringify(value) }]);
    send(false);
  };
  const swap = () => change({ text: !text, value: text ? parsed(value, schema) : JSON.stringify(value, null, 2) ?? "" });
  return html`<form class="answer" onSubmit=${submit}>
    ${text
      ? html`<label class="field"><span>Output of the tool</span>
          <textarea rows="3" required value=${value} onInput=${(event) => change({ value: event.target.value })}></textarea>
            </label>`
      : html`<${SchemaForm} schema=${schema} value=${value} change=${(next) => change({ value: next })} name="Output of the tool" />`}
    <div class="foot">
      ${schema && html`<${Button} kind="quiet" onClick=${swap}>${text ? "As a form" : "As text"}<//>`}
      <button type="submit" class="button small primary" disabled=${sending}><${Icon} name="send" />
        <span>Send output</span></button>
    </div>
  </form>`;
}

function parsed(text, schema) {
  try {
    return JSON.parse(text);
  } catch {
    return initial(schema);
  }
}
