// Waiting: calls and approvals that need somebody, with a form for each answer.

import { html, useState } from "../vendor/standalone.module.js";
import { key, list } from "../api.js";
import { Answer, Approval, Arguments } from "../answers.js";
import { Ago, Empty, Icon, Loaded, More, Page, State } from "../elements.js";
import { nameOf, outputsOf } from "../items.js";
import { attempt, href, useList, useWatched } from "../state.js";
import { answer, namedOf, pendingOf } from "../turns.js";

const EVERY_MS = 2000;
const PAGE = 30;

export function Waiting() {
  const owner = useWatched(key);
  const load = (most) => list("v1/responses", { status: "waiting", order: "asc" }, most);
  const loaded = useList(load, [owner], EVERY_MS, PAGE);
  return html`<${Page} title="Waiting" note="Answers that need somebody: the output of a tool, or a yes or no. They wait without a connection, also over a restart. A response that gets no answer in time fails: after its tool_timeout_s, 600 seconds unless the request or the server says otherwise.">
    <${Loaded} of=${loaded}>
      ${({ data }) => (data.length
        ? html`<ul class="cards" aria-label="What waits">${data.map((each) => html`<${Waits} key=${each.id} response=${each} reload=${loaded.reload} />`)}</ul>
            <${More} of=${loaded} />`
        : html`<${Empty} icon="check" title="Nothing waits">When a model asks for the output of a tool that is yours, or for leave to use one, it stands here until it is answered.<//>`)}
    <//>
  <//>`;
}

function Waits({ response, reload }) {
  const [given, setGiven] = useState(new Set());
  const open = namedOf(response) ?? pendingOf(response.output);
  const items = response.output.filter((item) => {
    const id = item.type === "mcp_approval_request" ? item.id : item.call_id;
    return open.has(id) && !given.has(id) && !/_output$|_response$/.test(item.type);
  });
  const outputs = outputsOf(response.output);
  const send = async (id, said) => {
    if (await attempt(() => answer(response.id, said), "Answered")) setGiven(new Set([...given, id]));
    reload();
  };
  return html`<li class="card waits">
    <div class="row">
      <${State} name="waiting" /><span class="faint">${response.model} · <${Ago} at=${response.created_at} />${response.tool_timeout_at && html` · ends <${Ago} at=${response.tool_timeout_at} />`}</span>
        <span class="grow"></span>
      ${response.conversation && html`<a class="chip" href=${href("chat", response.conversation.id)}>
        <${Icon} name="chat" />chat</a>`}
      <a class="chip" href=${href("runs", response.id)}><${Icon} name="runs" />run</a>
    </div>
    ${items.map((item) => {
      if (item.type === "mcp_approval_request") {
        return html`<${Approval} key=${item.id} item=${item} open answered=${outputs[item.id]} answer=${(said) => send(item.id, said)} />`;
      }
      const tool = response.tools?.find((each) => each.name === item.name);
      return html`<div key=${item.call_id} class="call-card open" role="group" aria-label=${`Call of ${nameOf(item)}`}>
        <div class="call-head"><${Icon} name="tool" /><strong>${nameOf(item)}</strong>
          <span class="faint clip">${tool?.description}</span></div>
        <${Arguments} text=${item.arguments ?? item.input ?? JSON.stringify(item.action ?? item.operation ?? {})} />
        <${Answer} item=${item} tool=${tool} answer=${(said) => send(item.call_id, said)} />
      </div>`;
    })}
    ${!items.length && html`<p class="faint">Answered; going on…</p>`}
  </li>`;
}
