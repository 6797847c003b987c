// What is written for conversations: drafts, and messages on their way. A message stays in this tab until the server has
// taken it, also over a reload, and goes back to where it was written if it is refused.

import { get, idempotencyKey, online, post, remove, sleep, watched } from "./api.js";
import { go, kept, replace, route } from "./state.js";
import { canTryAgain } from "./stream.js";
import { titleOf } from "./title.js";
import { begin, forget, leave, moved } from "./turns.js";

const SHOWN_MS = 1000; // in which the first message of a conversation may be refused before it is shown
const LATE_MS = 3_600_000; // after which a message is not sent by itself: the server may have forgotten that it has it
const SENT = "antiphon.sent.";

const drafts = new Map();

/** What is written next in a conversation, or without an id in one that has not begun: watched values of its text, of
 * its files, and of the error for which it was refused. */
export function draftOf(id) {
  const name = id ?? "new";
  if (!drafts.has(name)) {
    const files = kept(`attached.${name}`, []);
    const uploaded = files.get().filter((file) => file.id); // the others were cut when the page was loaded anew
    if (uploaded.length < files.get().length) files.set(uploaded);
    drafts.set(name, { text: kept(`draft.${name}`, ""), files, refusal: watched(null) });
  }
  return drafts.get(name);
}

/** Change the files among which this one is, wherever a draft has taken them meanwhile. */
export function changeFiles(file, change) {
  for (const { files } of drafts.values()) if (files.get().includes(file)) files.set(change(files.get()));
}

/** The content of a message that was written. */
export const contentOf = ({ text, files }) => [
  ...files.map((file) => ({ type: file.image ? "input_image" : "input_file", file_id: file.id })),
  ...(text.trim() ? [{ type: "input_text", text }] : []),
];

/** Send what was written, once the server can be reached. Resolves when the server has taken it, or refused it. conversation:
 * null for the first message of one, which is made for it, and gone again if that message is refused. content: where it is
 * not made of what was written alone. */
export function send(conversation, body, written, content) {
  const sent = { conversation, isFirst: conversation === null, body, content, written, key: idempotencyKey(), at: Date.now() };
  takeOut(conversation, written); // first: the browser keeps so much and no more, drafts included
  if (!keep(sent)) putBack(conversation, written); // it stays a draft until the server has taken it
  return deliver(sent);
}

/** Send again what the server may not have taken before this page was loaded; by its key it is carried out once. */
export function sendAgain() {
  for (const name of Object.keys(sessionStorage).filter((each) => each.startsWith(SENT))) {
    const sent = JSON.parse(sessionStorage.getItem(name));
    if (Date.now() - sent.at < LATE_MS) {
      deliver(sent);
    } else {
      putBack(sent.conversation, sent.written);
      sessionStorage.removeItem(name);
    }
  }
}

async function deliver(sent) {
  const { isFirst, body, written, content = contentOf(written), key } = sent;
  const opening = sent.conversation ? Promise.resolve(sent.conversation) : opened(titleOf(content), `${key}-conversation`);
  const turn = begin(sent.conversation ?? opening, body, [{ type: "message", role: "user", content }], key);
  const conversation = await opening.catch(() => null); // the turn tells why there is none
  if (conversation && !sent.conversation) {
    const isRefused = await Promise.race([turn.begun, sleep(SHOWN_MS)]);
    if (!isRefused) goOnIn(conversation, sent, turn);
  }
  const problem = await turn.begun;
  if (!isKept(sent)) takeOut(sent.conversation, written);
  if (!problem) {
    sessionStorage.removeItem(SENT + key);
    return isShown(conversation) || leave(conversation);
  }
  forget(turn);
  const home = isFirst && (!conversation || (await isRemoved(conversation))) ? null : conversation;
  if (home !== sent.conversation) moveDraft(sent.conversation, home);
  sessionStorage.removeItem(SENT + key);
  putBack(home, written);
  draftOf(home).refusal.set(problem);
}

/** Go on in the conversation that was made for a first message: what was written behind that message belongs there, too. */
function goOnIn(conversation, sent, turn) {
  sent.conversation = conversation;
  if (isKept(sent)) keep(sent);
  moved(turn, conversation);
  moveDraft(null, conversation);
}

/** Make a conversation, as soon as there is a server that can; its id. key: by which it is made once. */
async function opened(title, key) {
  for (;;) {
    try {
      return (await post("v1/conversations", { title }, { headers: { "idempotency-key": key } })).id;
    } catch (problem) {
      if (!(await canTryAgain(problem))) throw problem;
    }
    await online();
  }
}

const isKept = ({ key }) => sessionStorage.getItem(SENT + key) !== null;

/** Keep a message that is on its way over a reload; whether there is room for it. */
function keep(sent) {
  try {
    sessionStorage.setItem(SENT + sent.key, JSON.stringify(sent));
    return true;
  } catch {
    return false;
  }
}

const isShown = (id) => route.get().page === "chat" && route.get().id === id;

/** Take what was written out of its box, unless that holds something else by now. */
function takeOut(id, written) {
  const { text, files } = draftOf(id);
  if (text.get() === written.text) text.set("");
  files.set(files.get().filter((each) => !written.files.includes(each)));
}

/** Move what is written in one box into another one, and who is writing there with it. */
export function moveDraft(from, to) {
  const { text, files } = draftOf(from);
  const written = { text: text.get(), files: files.get() };
  takeOut(from, written);
  putBack(to, written);
  if (isShown(from)) (to === null ? replace : go)("chat", to);
}

/** Put what was written back into its box, before what was written since. */
function putBack(id, written) {
  const { text, files } = draftOf(id);
  text.set([written.text, text.get()].filter(Boolean).join("\n\n"));
  files.set([...written.files, ...files.get()]);
}

/** Delete a conversation in which nothing is said; whether it is gone. */
async function isRemoved(id) {
  try {
    const [items, responses] = await Promise.all([
      get(`v1/conversations/${id}/items`, { limit: 1 }),
      get("v1/responses", { conversation: id, limit: 1 }).catch(() => ({ data: [] })),
    ]);
    if (items.data.length || responses.data.length) return false; // somebody else was first
    await remove(`v1/conversations/${id}`);
    return true;
  } catch (problem) {
    return problem.status === 404; // somebody else has deleted it
  }
}
