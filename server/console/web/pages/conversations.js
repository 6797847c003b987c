// Conversations as the tree that forks make of them, and the items of one, at each of which it can be forked.

import { html, useMemo, useState } from "../vendor/standalone.module.js";
import { get, key, list, post, remove } from "../api.js";
import { Ago, Button, Empty, ForkMark, Icon, Id, Loaded, More, Page, State, Sure } from "../elements.js";
import { textOf } from "../fold.js";
import { brief, nameOf } from "../items.js";
import { attempt, go, href, replace, useAttempt, useList, useWatched } from "../state.js";
import { Title, isCalled, learned } from "../title.js";

const PAGE = 500; // conversations, which have to be there with what they were forked from

/** Conversations below those that they were forked from: [{conversation, depth}], the newest tree first. */
export function tree(found) {
  const below = new Map();
  const known = new Set(found.map((each) => each.id));
  for (const each of found) {
    const parent = known.has(each.forked_from?.conversation_id) ? each.forked_from.conversation_id : null;
    below.set(parent, [...(below.get(parent) ?? []), each]);
  }
  const rows = [];
  const walk = (parent, depth) => {
    for (const each of (below.get(parent) ?? []).sort((one, other) => other.updated_at - one.updated_at)) {
      rows.push({ conversation: each, depth });
      walk(each.id, depth + 1);
    }
  };
  walk(null, 0);
  return rows;
}

export function Conversations({ id }) {
  const owner = useWatched(key);
  const [search, setSearch] = useState("");
  const loaded = useList((most) => list("v1/conversations", {}, most), [owner], 10_000, PAGE);
  return html`<${Page} title="Conversations" note="Each with what was forked from it. At an item a conversation can be rewound: it goes on from there in a fork, and the first one stays."
    actions=${html`<input type="search" placeholder="Search" aria-label="Search conversations" value=${search} onInput=${(event) => setSearch(event.target.value)} />`}>
    <${Loaded} of=${loaded}>
      ${({ data }) => (data.length
        ? html`<div class=${`split ${id ? "open" : ""}`}>
            <${Tree} of=${loaded} search=${search} id=${id} />
            ${id && html`<${One} key=${id} id=${id} changed=${loaded.reload} />`}
          </div>`
        : html`<${Empty} icon="tree" title="No conversations yet">A chat begins one, and so does POST /v1/conversations.<//>`)}
    <//>
  <//>`;
}

function Tree({ of, search, id }) {
  const rows = useMemo(() => tree(of.value.data), [of.value]);
  useWatched(learned);
  const shown = rows.filter(({ conversation }) => isCalled(conversation, search));
  return html`<ul class="tree" aria-label="Conversations">
    ${shown.map(({ conversation, depth }) => html`<li key=${conversation.id} style=${{ "--depth": search ? 0 : Math.min(depth, 8) }}>
      <a href=${href("conversations", conversation.id)} aria-current=${conversation.id === id ? "true" : undefined}>
        ${conversation.forked_from && html`<${ForkMark} />`}
        <span class="clip" dir="auto"><${Title} conversation=${conversation} /></span>
        ${conversation.status !== "active" && html`<${State} name=${conversation.status} />`}
        <small class="faint"><${Ago} at=${conversation.updated_at} /></small>
      </a>
    </li>`)}
    ${of.value.has_more && html`<li><${More} of=${of} label=${search ? "Search older ones" : undefined} /></li>`}
  </ul>`;
}

function One({ id, changed }) {
  const owner = useWatched(key);
  const load = async (most) => {
    const [conversation, items] = await Promise.all([
      get(`v1/conversations/${id}`),
      list(`v1/conversations/${id}/items`, { order: "asc" }, most),
    ]);
    return { conversation, ...items };
  };
  const loaded = useList(load, [id, owner], 0, 1000);
  const [once, forking] = useAttempt();
  const fork = (after) =>
    once(async () => go("chat", (await post(`v1/conversations/${id}/fork`, after ? { after } : {})).id), "Forked: what you say now is said there alone");
  const archive = async (status) => {
    if (await attempt(() => post(`v1/conversations/${id}`, { status }))) {
      loaded.reload();
      changed();
    }
  };
  const erase = () =>
    attempt(async () => {
      await remove(`v1/conversations/${id}`);
      replace("conversations");
      changed();
    }, "Deleted");
  return html`<section class="detail" aria-label="Conversation">
    <${Loaded} of=${loaded}>
      ${({ conversation, data: items, has_more: more }) => html`
        <header class="detail-head">
          <a class="button small quiet only-narrow" href="#/conversations">Back</a>
          <h2 class="clip" dir="auto"><${Title} conversation=${conversation} /></h2>
          <div class="actions">
            <a class="button small primary" href=${href("chat", id)}><${Icon} name="chat" /><span>Open</span></a>
            <${Button} icon="fork" disabled=${forking} onClick=${() => fork()}>Fork<//>
            <${Button} icon="archive" label=${conversation.status === "archived" ? "Take out of the archive" : "Archive"} onClick=${() => archive(conversation.status === "archived" ? "active" : "archived")} />
            <${Sure} icon="trash" label="Delete conversation" question="The conversation and its items are deleted. Forks of it stay." onYes=${erase} />
          </div>
        </header>
        <p class="faint row wraps"><${Id} value=${id} /> <span>begun <${Ago} at=${conversation.created_at} /></span>
          <span>${items.length}${more ? "+" : ""} items</span></p>
        <ol class="steps">
          ${items.map((item) => html`<li key=${item.id} class=${item.type === "message" ? item.role : "other"}>
            <div class="grow">
              <small class="faint">${item.type === "message" ? item.role : nameOf(item)} ${item.created_at && html`· <${Ago} at=${item.created_at} />`}</small>
              <p class="clip">${textOf(item).slice(0, 300) || brief(item)}</p>
            </div>
            <${Button} icon="fork" kind="quiet" label="Fork here, without what follows" onClick=${() => fork(item.id)} />
          </li>`)}
          ${!items.length && html`<li class="faint">Nothing has been said here yet.</li>`}
        </ol>
        <${More} of=${loaded} />`}
    <//>
  </section>`;
}
