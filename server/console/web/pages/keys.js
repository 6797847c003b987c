// Keys: those of every owner, for administrators.

import { html, useState } from "../vendor/standalone.module.js";
import { get, key, list, post, remove, watched } from "../api.js";
import { Ago, Button, Copy, Dialog, Empty, Failure, Field, Id, Loaded, More, Page, Sure } from "../elements.js";
import { limitWords } from "../limit_words.js";
import { NameDialog } from "../named_list.js";
import { attempt, dialog, notify, useList, useWatched } from "../state.js";

const SCOPES = [
  "all.read", "responses", "conversations", "chat", "models", "files", "vector_stores", "containers", "embeddings", "audio",
  "batches", "prompts", "usage", "metrics",
];
const LIMITS = {
  requests_per_minute: "Requests a minute", requests_per_day: "Requests a day", tokens_per_minute: "Tokens a minute",
  tokens_per_day: "Tokens a day", concurrent_requests: "Requests at once", total_tokens: "Tokens in all",
};

const FEW = 5; // owners that are shown with their keys at once: those of each are two requests

const fresh = watched(null); // a key that was just made: it is shown only now, and stays until it is put away

export function Keys() {
  const owner = useWatched(key);
  const made = useWatched(fresh);
  const [making, make] = useState(null); // "owner", or the owner of the key and what is done when there is one
  const [refused, refuse] = useState(null);
  const begin = (what) => {
    make(what);
    refuse(null);
  };
  const loaded = useList((most) => list("v1/organization/projects", {}, most), [owner]);
  const denied = loaded.error && [401, 403].includes(loaded.error.status);
  const create = async (event) => {
    event.preventDefault();
    const form = new FormData(event.target);
    const days = Number(form.get("days"));
    const some = (form.get("more") ?? "").split(/[\s,]+/).filter(Boolean);
    const body = { name: form.get("name").trim(), scopes: [form.get("whole"), ...form.getAll("scope"), ...some].filter(Boolean) };
    const limits = Object.keys(LIMITS).filter((name) => form.get(name)).map((name) => [name, Number(form.get(name))]);
    if (limits.length) body.limits = Object.fromEntries(limits);
    if (days > 0) body.expires_in_seconds = days * 86_400;
    try {
      const found = await post(`${pathOf(making.project)}/api_keys`, body);
      begin(null);
      fresh.set(found.value ?? found.key);
      making.done();
    } catch (error) {
      refuse(error);
    }
  };
  const createOwner = async (name) => {
    await post("v1/organization/projects", { name });
    loaded.reload();
  };
  if (denied) {
    return html`<${Page} title="Keys">
      <${Empty} icon="key" title="For administrators">This page needs a key with the scope admin; the other pages need one with the scope all, and one key can have both. Where the server runs, <code>antiphon keys create --owner local --scope all --scope admin</code> makes one, with the <code>--data</code> or <code>--db</code> that the server has, if it has any. With <code>--owner local</code> it sees what was made without a key as well.<//>
      <div class="centre"><${Button} icon="key" kind="primary" onClick=${() => dialog.set("key")}>Use a key<//></div>
      <//>`;
  }
  return html`<${Page} title="Keys" note="Who may use this server, and for what."
    actions=${html`<${Button} icon="plus" onClick=${() => begin("owner")}>New owner<//>`}>
    ${made && html`<div class="notice good" role="status"><p>Copy the key now: it is shown until you press Done or reload this page, and never again.</p>
      <div class="row"><code class="secret">${made}</code><${Copy} text=${made} label="Copy the key" />
      <${Button} kind="quiet" onClick=${() => fresh.set(null)}>Done<//></div></div>`}
    ${making === "owner" && html`<${NameDialog} title="New owner" close=${() => begin(null)} make=${createOwner} />`}
    ${making && making !== "owner" && html`<${Dialog} title=${`New key of ${making.project.name}`} close=${() => begin(null)}>
      <form onSubmit=${create}>
        <${Field} label="Name"><input name="name" required maxlength="256" /><//>
        <fieldset><legend>What it may do</legend>
          <${Reach} />
          <${Field} label="Only these models and tools" hint="Such as model:antiphon-* or tool:function. Empty: all of them.">
            <input name="more" autocomplete="off" spellcheck="false" /><//></fieldset>
        <fieldset><legend>At most</legend>
          <div class="pair">${Object.entries(LIMITS).map(([name, label]) => html`<${Field} label=${label}><input name=${name} type="number" min="1" step="1" /><//>`)}</div>
          <small class="faint">Empty: no such limit of this key. Those of its owner hold besides.</small></fieldset>
        <${Field} label="Days until it ends" hint="Empty: it does not end.">
          <input name="days" type="number" min="1" step="1" /><//>
        ${refused && html`<${Failure} error=${refused} />`}
        <footer><button type="submit" class="button primary">Make it</button></footer>
      </form><//>`}
    <${Loaded} of=${loaded}>
      ${({ data, has_more: more }) => (data.length
        ? html`${data.map((project) => html`<${Owner} key=${project.id} project=${project} few=${!more && data.length <= FEW} begin=${begin} />`)}
            <${More} of=${loaded} />`
        : html`<${Empty} icon="key" title="No owners yet">On a server without keys everybody on this machine is the owner local.<//>`)}
    <//>
  <//>`;
}

/** Everything, or some of it; and the administration besides. */
function Reach() {
  const [whole, setWhole] = useState(true);
  const one = (value, is, words) => html`<label class="check">
    <input type="radio" name="whole" value=${value} checked=${is} onChange=${() => setWhole(value === "all")} /><span>${words}</span>
  </label>`;
  const box = (scope, words = scope) => html`<label class="check">
    <input type="checkbox" name="scope" value=${scope} /><span>${words}</span>
  </label>`;
  return html`${one("all", whole, "Everything but administration (all)")}
    ${one("", !whole, "Only what is chosen here")}
    ${!whole && html`<div class="choices" role="group" aria-label="Scopes">${SCOPES.map((scope) => box(scope))}</div>`}
    ${box("admin", "Administration, too (admin)")}`;
}

const MAKE = "antiphon keys create makes one, on the server's machine.";

const pathOf = ({ id }) => `v1/organization/projects/${id}`;

/** One owner; the keys are asked for when they are to be seen. few: at once. begin: has a key made. */
function Owner({ project, few, begin }) {
  const owner = useWatched(key);
  const [open, setOpen] = useState(few);
  const load = async (most) => {
    if (!open) return null;
    const [keys, limits] = await Promise.all([list(`${pathOf(project)}/api_keys`, {}, most), get(`${pathOf(project)}/limits`)]);
    return { ...keys, limits: limitWords(limits.in_force) };
  };
  const loaded = useList(load, [project.id, owner, open]);
  const done = () => (open ? loaded.reload() : setOpen(true));
  const revoke = async ({ id }) => {
    const done = async () => {
      const { opens_server: opens, locks_server: locks } = await remove(`${pathOf(project)}/api_keys/${id}`);
      notify(opens ? "Revoked. The server needs no key now." : locks ? `Revoked. No key is accepted now. ${MAKE}` : "Revoked");
    };
    if (await attempt(done)) loaded.reload();
  };
  return html`<section aria-label=${project.name}>
    <div class="section-head">
      <h2 class="row wraps"><${Button} icon=${open ? "down" : "right"} kind="quiet" aria-expanded=${open} onClick=${() => setOpen(!open)}>${project.name}<//>
        <${Id} value=${project.id} /></h2>
      <${Button} icon="plus" kind="quiet" onClick=${() => begin({ project, done })}>New key<//></div>
    ${open && html`<${Loaded} of=${loaded}>
      ${({ data, limits }) => html`${limits.length > 0 && html`<p class="faint">All keys together: ${limits.join(", ")}</p>`}
        ${data.length
          ? html`<div class="table-frame"><table class="list">
              <thead><tr><th scope="col">Name</th><th scope="col">Key</th>
                <th scope="col" class="hide-narrow">May do</th><th scope="col" class="hide-narrow">Limits</th>
                <th scope="col" class="figure hide-narrow">Ends</th><th scope="col" class="figure hide-narrow">Used</th>
                <th scope="col" class="figure hide-narrow">Made</th><th scope="col">
                <span class="out-of-sight">Actions</span></th></tr></thead>
              <tbody>${data.map((each) => html`<${Row} key=${each.id} of=${each} path=${`${pathOf(project)}/api_keys/${each.id}`} revoke=${() => revoke(each)} />`)}</tbody>
            </table></div><${More} of=${loaded} />`
          : html`<p class="faint">No keys.</p>`}`}
    <//>`}
  </section>`;
}

function Row({ of, path, revoke }) {
  const limits = limitWords(of.limits);
  const question = async () => {
    const { opens_server: opens, locks_server: locks } = await get(path);
    const said = ["Whoever uses this key is refused at once."];
    if (key.get() && of.redacted_value.endsWith(key.get().slice(-4))) said.push("It is the key that this tab uses.");
    if (opens) said.push("It is the last key. After this the server needs no key: whoever reaches it may use it.");
    if (locks) said.push(`It is the last key that is accepted, and the server still needs one. ${MAKE}`);
    return said.join(" ");
  };
  const ends = of.expires_at && html`<${Ago} at=${of.expires_at} />`;
  return html`<tr>
    <td class="main"><span class="clip">${of.name || html`<span class="faint">Unnamed</span>`}</span>
      <small class="faint show-narrow">${[...of.scopes, ...limits].join(", ")}${ends && html`, ends ${ends}`}</small></td>
    <td class="mono faint">${of.redacted_value}</td>
    <td class="faint several hide-narrow">${of.scopes.join(", ")}</td>
    <td class="faint several hide-narrow">${limits.length ? limits.map((said) => html`<div>${said}</div>`) : "–"}</td>
    <td class="figure faint hide-narrow">${ends ?? "never"}</td>
    <td class="figure faint hide-narrow"><${Ago} at=${of.last_used_at} /></td>
    <td class="figure faint hide-narrow"><${Ago} at=${of.created_at} /></td>
    <td class="row-actions">
      <${Sure} icon="trash" label=${`Revoke ${of.name}`} yes="Revoke" question=${question} onYes=${revoke} />
      </td>
  </tr>`;
}
