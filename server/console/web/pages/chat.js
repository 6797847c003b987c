// Chat: conversations, the turns of one of them, and what is said next.

import { html, useEffect, useLayoutEffect, useMemo, useRef, useState } from "../vendor/standalone.module.js";
import { connection, get, key, list, online, post, refused, remove, sleep } from "../api.js";
import { Ago, Button, Copy, Failure, ForkMark, Icon, Loaded, More, Popover, State, Sure, cancelledFor, isNarrow, number, seconds, survived } from "../elements.js";
import { textOf } from "../fold.js";
import { Item, outputsOf, withCards } from "../items.js";
import { attempt, dialog, go, href, kept, replace, useAttempt, useChanged, useList, useLoaded, useRedraw, useWatched } from "../state.js";
import { draftOf, moveDraft, send } from "../outbox.js";
import { answer, answeredOf, begin, forget, goOn, hasEnded, leave, pendingOf, resume, stop, turnOf, watchTurns } from "../turns.js";
import { Composer, isSending, useSettings } from "../composer.js";
import { Title, called, isCalled, learned, titleOf } from "../title.js";

const PAGE = 100; // items that are shown at first, and more by the button
const AGAIN_MS = 500; // before a conversation that could not be loaded is loaded again
const LOCKED = "conversation_locked";
const LOADING_MS = 1000; // between two looks whether a model is loaded
const WATCH_MS = 3000; // between two looks for what other tabs and clients did

export function Chat({ id }) {
  const [listed, setListed] = useState(false);
  useEffect(() => setListed(false), [id]);
  return html`<div class=${`chat ${listed ? "listed" : ""}`}>
    <${Conversations} id=${id} />
    <${Thread} key=${id ?? "new"} id=${id} showList=${() => setListed(!listed)} />
  </div>`;
}

// --- the conversations at the side

function Conversations({ id }) {
  const owner = useWatched(key);
  const [search, setSearch] = useState("");
  const loaded = useList((most) => list("v1/conversations", { status: "active" }, most), [owner], 8000);
  useEffect(() => {
    if (loaded.value) loaded.reload();
  }, [id]);
  useWatched(learned);
  const redraw = useRedraw();
  useEffect(() => watchTurns(redraw), []);
  return html`<nav class="side" aria-label="Conversations">
    <div class="side-head">
      <a class="button primary" href="#/chat"><${Icon} name="plus" /><span>New chat</span></a>
      <input type="search" value=${search} onInput=${(event) => setSearch(event.target.value)} placeholder="Search" aria-label="Search conversations" />
    </div>
    <${Loaded} of=${loaded}>
      ${({ data: talks }) => html`<ul class="side-list">
        ${talks
          .filter((each) => isCalled(each, search))
          .sort((one, other) => other.updated_at - one.updated_at)
          .map((each) => {
            const turn = turnOf(each.id);
            const busy = turn ? !turn.ended : Boolean(each.active_response_id);
            return html`<li key=${each.id}>
              <a href=${href("chat", each.id)} aria-current=${each.id === id ? "page" : undefined}>
                <span class="clip" dir="auto">${each.forked_from && html`<${ForkMark} />`}<${Title} conversation=${each} /></span>
                ${busy ? html`<i class="pulse" role="img" aria-label="being answered">
                  </i>` : html`<small class="faint"><${Ago} at=${each.updated_at} /></small>`}
              </a>
            </li>`;
          })}
        ${loaded.value.has_more && html`<li><${More} of=${loaded} label=${search ? "Search older ones" : undefined} /></li>`}
        ${!talks.length && html`<li class="faint side-empty">No conversations yet.</li>`}
      </ul>`}
    <//>
  </nav>`;
}

// --- one conversation

/** A conversation, its newest items and its newest responses, so many of each at most. */
const newestOf = (id, numItems, numResponses) =>
  Promise.all([
    get(`v1/conversations/${id}`),
    list(`v1/conversations/${id}/items`, { order: "desc" }, numItems),
    get("v1/responses", { conversation: id, limit: numResponses }).catch(() => ({ data: [] })),
  ]);

const inputs = new Map(); // of responses that have ended, by their ids: these stay as they are

async function inputOf(id) {
  if (!inputs.has(id)) inputs.set(id, (await get(`v1/responses/${id}/input_items`, { order: "asc", limit: 100 })).data);
  return inputs.get(id);
}

/** All that a thread shows of a conversation which is stored. */
async function history(id, most) {
  const [conversation, { data: items, has_more: more }, responses] = await newestOf(id, most, 20);
  const newest = responses.data[0];
  const ids = new Set(items.map((item) => item.id));
  // Turns that ended without becoming part of the conversation, unless a later one has taken them along.
  const ended = responses.data.filter(({ status }) => status === "failed" || status === "cancelled").reverse();
  const asked = await Promise.all(ended.map((response) => inputOf(response.id).catch(() => [])));
  const left = ended
    .map((response, index) => ({ response, input: asked[index] }))
    .filter(({ input }) => !input.some((item) => ids.has(item.id)));
  return { conversation, items: items.reverse(), more, responses: responses.data, newest, left };
}

/** As much of a conversation as tells whether it has gone on. */
async function latest(id) {
  const [conversation, items, responses] = await newestOf(id, 1, 1);
  return { conversation, items: items.data, newest: responses.data[0] };
}

// Times alone would not do: they are whole seconds, and two turns may end in the same one.
const markOf = ({ conversation, items, newest }) =>
  [conversation.updated_at, conversation.title, conversation.status, items.at(-1)?.id, newest?.id, newest?.status].join();

/** What is written in the place of a message, until its fork has it: {conversation, item, text}, by ids, or null. */
const edited = kept("edited", null);

function Thread({ id, showList }) {
  const owner = useWatched(key);
  const redraw = useRedraw();
  const [settings, keep] = useSettings();
  const [most, setMost] = useState(PAGE);
  const [editing, edit] = useState(() => (edited.get()?.conversation === id ? edited.get().item : null));
  const [once, branching] = useAttempt();
  const section = useRef();
  const focused = useRef(null); // what has had the focus last
  const refusal = useWatched(draftOf(id).refusal);
  const loaded = useLoaded(() => (id ? history(id, most) : null), [id, owner, most]);
  const found = loaded.value;
  const gone = loaded.error?.status === 404;
  const turn = turnOf(id);

  useWatched(learned);
  const name = found && called(found.conversation);
  useEffect(() => {
    if (name) document.title = `${name} · Antiphon`;
  }, [name]);

  useEffect(() => watchTurns((each) => each.conversation === id && redraw()), [id]);
  useEffect(() => () => id && leave(id), [id]);

  // What was cut because a key was refused is found again with another key.
  useEffect(() => {
    if (isCut(turn)) forget(turn);
  }, [owner]);

  // What is being made, be it after a reload or by another client, is read from its beginning on.
  useEffect(() => {
    const newest = found?.newest;
    if (newest && !hasEnded(newest)) resume(id, newest);
  }, [found]);
  useEffect(() => {
    if (!id || !found || gone) return undefined;
    const look = async () => {
      if (document.visibilityState !== "visible" || connection.get() !== "online" || turnOf(id)) return;
      const now = await latest(id).catch((problem) => (problem.status === 404 ? "gone" : null));
      if (!now || turnOf(id)) return;
      if (now === "gone") loaded.reload();
      else if (now.newest && !hasEnded(now.newest)) resume(id, now.newest);
      else if (markOf(now) !== markOf(found)) loaded.reload();
    };
    const timer = setInterval(look, WATCH_MS);
    return () => clearInterval(timer);
  }, [id, found, gone]);

  // A turn that has ended is shown as it was until the stored conversation has it.
  const ended = turn?.ended && turn;
  useEffect(() => {
    if (!ended || ended.error || gone) return undefined;
    let left = false;
    const join = async () => {
      while (!left && !(await loaded.reload())) {
        await sleep(AGAIN_MS);
        await online();
      }
      if (left) return;
      forget(ended);
      redraw();
    };
    join();
    return () => {
      left = true;
    };
  }, [ended, gone]);

  // What was refused is back in its box, and it may be that somebody else was first, whose turn is shown.
  useEffect(() => {
    if (refusal && found) loaded.reload();
  }, [refusal]);

  const say = async (written) => {
    const now = turnOf(id);
    if (now && !now.ended) return; // Enter was pressed twice
    if (refused.get()) return dialog.set("key");
    draftOf(id).refusal.set(null);
    await send(id, settings.body(), written);
  };

  /** What is said before an item, be it shown or not; nothing before the first. */
  const itemBefore = async ({ id: after }) => {
    const at = found.items.findIndex((each) => each.id === after);
    if (at || !found.more) return found.items[at - 1];
    return (await get(`v1/conversations/${id}/items`, { order: "desc", after, limit: 1 })).data[0];
  };

  /** A conversation that begins with other words than this one: it shares nothing with it, and is no fork. A title that the
   * console has made of the first message is made of the new one. */
  const beginning = (item, content) => {
    const { title, metadata } = found.conversation;
    return post("v1/conversations", { title: title === titleOf(item.content) ? titleOf(content) : title, metadata });
  };

  /** Go on from before an item in a conversation of its own, with other words or the same ones again. */
  const branch = async (item, content) => {
    const before = content ? await itemBefore(item) : found.items.find((each) => each.id === item.id);
    const made = before ? await post(`v1/conversations/${id}/fork`, { after: before.id }) : await beginning(item, content);
    if (content) send(made.id, settings.body(), { text: textOf({ content }), files: filesOf(content) }, content);
    else begin(made.id, settings.body(), []);
    go("chat", made.id);
  };
  const branchOnce = (...args) => once(() => branch(...args));
  const fork = (body, done) => once(async () => go("chat", (await post(`v1/conversations/${id}/fork`, body)).id), done);

  const again = async (input) => {
    if (turn) forget(turn);
    begin(id, settings.body(), input.map(({ id: _, status: __, ...item }) => item));
    redraw();
  };

  const pick = (idea) => {
    draftOf(null).text.set(idea);
    document.getElementById("composer").focus();
  };

  // What had the focus may be gone with what it has done: then it is where one goes on.
  useLayoutEffect(() => {
    if (!focused.current || focused.current.isConnected || document.activeElement !== document.body) return;
    focused.current = null;
    const next = section.current.querySelector(":is(.answer, .call-card.open) :is(input, select, textarea)");
    (next ?? document.getElementById(isNarrow() ? "title" : "composer")).focus();
  });

  const working = turn && !turn.ended;
  // What has ended is shown once: as it was written until it is loaded, and as it is stored from then on.
  const stored = new Set(found?.responses.filter(hasEnded).map((response) => response.id));
  const live = [];
  for (let each = turn; each && !stored.has(each.id); each = each.before) live.unshift(each);
  const title = found ? html`<${Title} conversation=${found.conversation} />` : gone ? "Not there" : id ? "Untitled" : "New chat";
  return html`<section class="thread" aria-labelledby="title" ref=${section} onFocusCapture=${(event) => (focused.current = event.target)}>
    <header class="thread-head">
      <${Button} icon="chat" kind="quiet" label="Conversations" class="button small quiet bare only-narrow" onClick=${showList} />
      <h1 id="title" tabindex="-1" class="clip" dir="auto">${title}</h1>
      ${found?.conversation.forked_from && html`<a class="chip" href=${href("chat", found.conversation.forked_from.conversation_id)}>
        <${Icon} name="fork" />forked</a>`}
      <div class="actions">
        ${id && html`<${ThreadMenu} conversation=${gone ? null : found?.conversation} reload=${loaded.reload} fork=${fork} />`}
      </div>
    </header>
    <${Scroller} key=${id} watch=${[found, turn?.state, turn?.state.items.length]} working=${working}>
      ${!id && !turn && html`<${Welcome} pick=${pick} />`}
      ${id && !gone && html`<${Loaded} of=${loaded}>${() => null}<//>`}
      ${found?.more && html`<div class="centre">
        <${Button} kind="quiet" onClick=${() => setMost(most + 200)}>Show earlier items<//></div>`}
      ${found && html`<${Turns} found=${found} editing=${editing} edit=${edit} branch=${branchOnce} fork=${fork} branching=${branching} id=${id} working=${working || gone} live=${live} again=${again} />`}
      ${live.map((each) => html`<${Live} key=${each} turn=${each} redraw=${redraw} again=${again} />`)}
      ${gone && html`<${Gone} id=${id} known=${Boolean(found)} />`}
      ${refusal && !gone && (refusal.code === LOCKED ? working && html`<${Locked} />` : html`<${Failure} error=${refusal} />`)}
    <//>
    <${Composer}
      id=${id}
      send=${say}
      unsent=${working && !turn.id}
      working=${working}
      waiting=${turn?.pending.size > 0}
      stop=${() => attempt(() => stop(turn))}
      canStop=${Boolean(turn?.id)}
      disabled=${gone ? "This conversation was deleted." : found?.conversation.status === "archived" && "This conversation is archived."}
      settings=${settings}
      keep=${keep}
    />
  </section>`;
}

/** That a conversation is not there. known: it was there before. */
function Gone({ id, known }) {
  const draft = draftOf(id);
  const text = useWatched(draft.text);
  const files = useWatched(draft.files);
  return html`<div class="notice ask" role="alert">
      ${known ? "This conversation was deleted." : "There is no such conversation. It was deleted, or it is another owner's."}</div>
    ${(text || files.length > 0) && html`<div><${Button} icon="plus" onClick=${() => moveDraft(id, null)}>Take what you wrote to a new chat<//></div>`}`;
}

function Welcome({ pick }) {
  const ideas = ["Count from 1 to 100.", "What can you do?", "My name is Anna. Say hello to me.", "What is the capital of France?"];
  return html`<div class="welcome">
    <h2>What shall we talk about?</h2>
    <p class="faint">The server keeps what is said. Close this tab, end the server, come back: the answer goes on.</p>
    <div class="ideas">${ideas.map((idea) => html`<button type="button" class="idea" onClick=${() => pick(idea)}>${idea}</button>`)}</div>
  </div>`;
}

function ThreadMenu({ conversation, reload, fork }) {
  if (!conversation) return null;
  const rename = async (event, close) => {
    event.preventDefault();
    const title = new FormData(event.target).get("title").trim();
    if (!(await attempt(() => post(`v1/conversations/${conversation.id}`, { title: title || null })))) return;
    close();
    reload();
  };
  const archive = async () => {
    const status = conversation.status === "archived" ? "active" : "archived";
    if (await attempt(() => post(`v1/conversations/${conversation.id}`, { status }))) reload();
  };
  const erase = () => attempt(() => remove(`v1/conversations/${conversation.id}`).then(() => replace("chat")), "Deleted");
  const archived = conversation.status === "archived";
  return html`<${Popover} icon="more" label="More" align="right">
    ${(close) => html`<form onSubmit=${(event) => rename(event, close)}>
        <label class="field"><span>Title</span><input name="title" maxlength="512" defaultValue=${conversation.title ?? ""} />
          </label>
        <div class="foot"><button type="submit" class="button small">Rename</button></div>
      </form>
      <div class="menu">
        <${Button} icon="fork" kind="quiet" onClick=${() => (close(), fork({}, "Forked"))}>Fork this conversation<//>
        <${Button} icon="archive" kind="quiet" onClick=${() => (close(), archive())}>${archived ? "Take out of the archive" : "Archive"}<//>
        <${Sure} icon="trash" label="Delete conversation" question="The conversation and its items are deleted. Forks of it stay." onYes=${erase}>Delete<//>
      </div>`}
  <//>`;
}

// --- turns

/** Items in groups: what one side said before the other did. */
function groups(items) {
  const found = [];
  for (const item of items) {
    const role = item.type === "message" ? (item.role === "assistant" ? "assistant" : item.role) : "assistant";
    const last = found[found.length - 1];
    if (last && last.role === role && role === "assistant") last.items.push(item);
    else found.push({ role, items: [item] });
  }
  return found;
}

function Turns({ found, editing, edit, branch, fork, branching, id, working, live, again }) {
  const outputs = useMemo(() => outputsOf(found.items), [found]);
  const made = useMemo(() => {
    const byItem = new Map();
    for (const response of found.responses) for (const item of response.output) byItem.set(item.id, response);
    return byItem;
  }, [found]);
  const [given, give] = useState([]);
  useEffect(() => give([]), [found]);
  const said = new Set(given.map((each) => each.approval_request_id ?? each.call_id));
  const open = useMemo(() => new Set([...pendingOf(found.items)].filter((each) => !said.has(each))), [found, given]);
  // A response that ended with calls goes on once all of them are answered.
  const send = (response, outputs_) => {
    const now = [...given, ...outputs_];
    give(now);
    if (open.size <= outputs_.length) goOn(id, response.id, now);
  };
  const all_ = groups(withCards(found.items));
  const lastUser = [...found.items].reverse().find((item) => item.type === "message" && item.role === "user");
  const left = found.left.filter(({ response }) => !live.some((each) => each.id === response.id));
  const answerOf = (group) => group?.items.map((item) => made.get(item.id)).find(Boolean);
  /** Whether a turn was left before a group was said: by the order of responses where it is known, else by the time. */
  const isBefore = (one, index) => {
    const reply = answerOf(all_[index]) ?? answerOf(all_[index + 1]);
    if (reply) return found.responses.indexOf(one) > found.responses.indexOf(reply);
    return one.created_at < (all_[index]?.items[0].created_at ?? (index < all_.length ? 0 : Infinity));
  };
  /** The turns that were left before a group. */
  const before = (index) => {
    const shown = [];
    while (left.length && isBefore(left[0].response, index)) {
      const one = left.shift();
      const last = one.response.id === found.newest.id && !live.length;
      shown.push(html`<${Left} key=${one.response.id} left=${one} again=${last ? again : null} />`);
    }
    return shown;
  };
  const turn = (group, index) => {
    const [first] = group.items;
    if (group.role !== "assistant") {
      return html`<${Said}
        key=${first.id}
        item=${first}
        conversation=${id}
        editing=${editing === first.id}
        edit=${edit}
        branch=${branch}
        branching=${branching}
        disabled=${working || branching}
      />`;
    }
    const response = answerOf(group);
    const last = index === all_.length - 1;
    return html`<article key=${first.id} class="turn assistant" aria-label="Answer">
      ${group.items.map((item) => html`<${Item}
        key=${item.id}
        item=${item}
        outputs=${outputs}
        tools=${response?.tools}
        pending=${last && response && !working ? open : undefined}
        given=${said}
        answer=${(outputs_) => send(response, outputs_)}
      />`)}
      <${Outcome} response=${response} />
      <footer class="turn-foot">
        <${Copy} text=${() => group.items.filter((item) => item.type === "message").map(textOf).join("\n\n")} label="Copy answer" />
        ${last && lastUser && html`<${Button} icon="again" kind="quiet" label="Answer anew in a fork" disabled=${working || branching} onClick=${() => branch(lastUser, null)} />`}
        <${Button} icon="fork" kind="quiet" label="Fork behind this answer" disabled=${branching} onClick=${() => fork({ after: group.items.at(-1).id }, FORKED)} />
        <${Meta} response=${response} />
      </footer>
    </article>`;
  };
  return [...all_.flatMap((group, index) => [...before(index), turn(group, index)]), ...before(all_.length)];
}

const FORKED = "Forked: what you say now is said there alone";

function Meta({ response }) {
  if (!response) return null;
  const { usage } = response;
  const lasted = response.completed_at && response.completed_at - response.created_at;
  return html`<a class="meta faint" href=${href("runs", response.id)} title="Open this run">
    <span>${response.model}</span>
    ${usage && html`<span>${number(usage.output_tokens)} tokens</span>`}
    ${lasted > 0 && html`<span>${seconds(lasted)}</span>`}
    ${response.status !== "completed" && html`<${State} name=${response.status} />`}
    ${cancelledFor(response) && html`<span>${cancelledFor(response)}</span>`}
    ${survived(response) && html`<span>${survived(response)}</span>`}
  </a>`;
}

/** A message as it is written anew. */
function Edited({ conversation, item, close, branch, branching }) {
  const [draft, keep] = useChanged(edited);
  const isOwn = (each) => each?.conversation === conversation && each.item === item.id;
  const text = isOwn(draft) ? draft.text : textOf(item);
  const write = (event) => keep({ conversation, item: item.id, text: event.target.value });
  const end = () => {
    keep((now) => (isOwn(now) ? null : now));
    close();
  };
  const area = useRef();
  // Before it is painted: what is typed at once, too, stands at the end.
  useLayoutEffect(() => {
    area.current.focus();
    area.current.setSelectionRange(text.length, text.length);
  }, []);
  const save = async (event) => {
    event.preventDefault();
    if (!text.trim()) return;
    const rest = typeof item.content === "string" ? [] : item.content.filter((part) => part.type !== "input_text").map(again);
    if (await branch(item, [...rest, { type: "input_text", text }])) end();
  };
  const keys = (event) => {
    if (event.key === "Escape" && !branching) end();
    if (isSending(event)) save(event);
  };
  return html`<form class="turn user editing" aria-busy=${branching} onSubmit=${save}>
    <label class="field"><span>Edit: the conversation goes on from here in a fork</span>
      <textarea ref=${area} rows="4" data-unsent readonly=${branching} value=${text} onInput=${write} onKeyDown=${keys}>
        </textarea></label>
    <div class="foot">
      <${Button} disabled=${branching} onClick=${end}>Cancel<//>
      <button type="submit" class="button small primary" disabled=${!text.trim() || branching}>Send in a fork</button>
    </div>
  </form>`;
}

function Said({ conversation, item, editing, edit, branch, branching, disabled }) {
  const words = textOf(item);
  if (editing) return html`<${Edited} conversation=${conversation} item=${item} close=${() => edit(null)} branch=${branch} branching=${branching} />`;
  return html`<article class=${`turn ${item.role}`} aria-label=${item.role === "user" ? "You" : item.role}>
    ${item.role !== "user" && html`<small class="faint">${item.role}</small>`}
    <div class="bubble"><${Item} item=${item} /></div>
    <footer class="turn-foot">
      <${Copy} text=${words} label="Copy message" />
      ${item.role === "user" && edit && html`<${Button} icon="edit" kind="quiet" label="Edit and fork" disabled=${disabled} onClick=${() => edit(item.id)} />`}
    </footer>
  </article>`;
}

/** The files of a message as they are attached. */
const filesOf = (content) =>
  content
    .filter((part) => part.file_id)
    .map((part) => ({ id: part.file_id, name: part.filename ?? part.file_id, image: part.type === "input_image" }));

/** A part of a message as it is sent again: by the file's id alone where it has one. */
const again = (part) => (part.file_id ? { type: part.type, file_id: part.file_id } : part);

/** Whether the server goes on with a turn of which this tab may read no more. */
const isCut = (turn) => Boolean(turn?.id) && turn.error?.status === 401;

/** A turn that is being made, or that has just ended. */
function Live({ turn, redraw, again: retry }) {
  const { state } = turn;
  const { pending } = turn;
  const outputs = outputsOf(state.items);
  const send = async (outputs_) => {
    await attempt(() => answer(turn.id, outputs_), "Answered");
    redraw();
  };
  const shown = withCards(state.items);
  const quiet = !turn.ended && !pending.size && !shown.some((item) => item.type === "message" && textOf(item));
  return html`${turn.input.map((item, index) => item.type === "message" && html`<${Said} key=${`in${index}`} item=${item} />`)}
    <article class="turn assistant" aria-label="Answer" aria-busy=${!turn.ended}>
      ${shown.map((item, index) => html`<${Item} key=${item.id ?? index} item=${item} outputs=${outputs} pending=${pending} given=${answeredOf(turn.id)} answer=${send} tools=${state.response?.tools} busy=${!turn.ended} />`)}
      ${quiet && html`<${Quiet} model=${turn.id ? null : turn.model} unsent=${!turn.id} said=${state.status === "queued" ? "Queued" : "Being answered"} />`}
      ${isCut(turn) && html`<div class="notice ask" role="status">The server goes on with this answer. It is shown again with another key of the same owner.</div>`}
      ${turn.error && !isCut(turn) && html`${turn.error.code === LOCKED ? html`<${Locked} />` : html`<${Failure} error=${turn.error} />`}
        <${Button} icon="again" onClick=${() => retry(turn.input)}>Try again<//>`}
      <${Outcome} response=${turn.ended ? state.response : null} />
    </article>`;
}

const Locked = () => html`<div class="notice ask" role="status">Another answer of this conversation is being made.</div>`;

/** Nothing has been written yet. model: the one that has not begun; it may have to be loaded first. unsent: whether the
 * server has not taken it yet. */
function Quiet({ model, unsent, said }) {
  const away = useWatched(connection) !== "online";
  const of = useLoaded(() => (model ? get(`v1/models/${model}`) : null), [model], model ? LOADING_MS : 0);
  const loading = model && of.value?.state && of.value.state !== "loaded";
  const word = unsent ? "Not sent yet" : said;
  return html`<div class="dots" role="status"><i></i><i></i><i></i>
    <span class=${loading || (unsent && away) ? "faint" : "out-of-sight"}>${loading && !away ? `Loading ${of.value.root}…` : word}</span></div>`;
}

function Outcome({ response }) {
  if (response?.status === "failed") return html`<div class="notice bad" role="alert">${response.error?.message ?? "The response failed."}</div>`;
  if (response?.status === "cancelled") return html`<div class="notice">Stopped. This turn is not part of the conversation.</div>`;
  if (response?.status === "incomplete") return html`<div class="notice ask">Ended early: ${response.incomplete_details?.reason?.replaceAll("_", " ")}.</div>`;
  return null;
}

/** A turn that failed or was stopped: it is not part of the conversation. again: null where another one followed. */
function Left({ left, again: retry }) {
  const { response, input } = left;
  const outputs = outputsOf(response.output);
  return html`${input.map((item) => item.type === "message" && html`<${Said} key=${item.id} item=${item} />`)}
    <article class="turn assistant left" aria-label="Answer that ended early">
      ${withCards(response.output).map((item) => html`<${Item} key=${item.id} item=${item} outputs=${outputs} />`)}
      <${Outcome} response=${response} />
      <footer class="turn-foot shown">
        ${retry && html`<${Button} icon="again" onClick=${() => retry(input)}>Try again<//>`}
        <${Meta} response=${response} />
      </footer>
    </article>`;
}

// --- scrolling

/** Keeps the end in sight while somebody is there. */
function Scroller({ children, watch, working }) {
  const ref = useRef();
  const inner = useRef();
  const stuck = useRef(true);
  const [away, setAway] = useState(false);
  const toEnd = () => {
    if (ref.current) ref.current.scrollTop = ref.current.scrollHeight;
  };
  useLayoutEffect(() => {
    const observer = new ResizeObserver(() => stuck.current && toEnd());
    observer.observe(inner.current);
    observer.observe(ref.current); // what is written below takes some of its room, and so does a banner
    return () => observer.disconnect();
  }, []);
  useLayoutEffect(() => {
    if (stuck.current) toEnd();
  }, watch);
  const scrolled = () => {
    const box = ref.current;
    if (!box) return; // an event of a page that is gone
    stuck.current = box.scrollHeight - box.scrollTop - box.clientHeight < 60;
    setAway(!stuck.current);
  };
  return html`<div class="scroller" ref=${ref} onScroll=${scrolled} tabindex="0" role="log" aria-label="Messages" aria-live=${working ? "off" : "polite"}>
    <div class="column" ref=${inner}>${children}</div>
    ${away && html`<${Button} icon="down" class="button small to-end" label="To the end" onClick=${() => { stuck.current = true; toEnd(); }} />`}
  </div>`;
}

