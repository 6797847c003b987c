// What is written for conversations: drafts, and messages on their way. A message stays in this tab until the server has
// taken it, also over a reload, and goes back to where it was written if it is refused.

import { get, idempotencyKey, remove, sleep, watched } from "./api.js";
import { go, kept, replace, route } from "./state.js";
import { begin, forget, leave } from "./turns.js";

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

/** The content of a message that was written. */
export const contentOf = ({ text, files }) => [
  ...files.map((file) => ({ type: file.image ? "input_image" : "input_file", file_id: file.id })),
  ...(text.trim() ? [{ type: "input_text", text }] : []),
];

/** Send what was written, once the server can be reached. Resolves to null when the server has taken it, and when it has
 * refused it to the error. from: whose draft it was; null for the first message of a conversation, which is gone again if
 * that message is refused. content: where it is not made of what was written alone. */
export function send(conversation, body, written, { from = conversation, content } = {}) {
  const sent = { conversation, from, body, content, written, key: idempotencyKey(), at: Date.now() };
  takeOut(from, written); // first: the browser keeps so much and no more, drafts included
  try {
    sessionStorage.setItem(SENT + conversation, JSON.stringify(sent));
    return deliver(sent);
  } catch {
    putBack(from, written); // too large to be kept as a message: it stays a draft until the server has taken it
    return deliver(sent, () => takeOut(from, written));
  }
}

/** Send again what the server may not have taken before this page was loaded; by its key it is carried out once. */
export function sendAgain() {
  for (const name of Object.keys(sessionStorage).filter((each) => each.startsWith(SENT))) {
    const sent = JSON.parse(sessionStorage.getItem(name));
    if (Date.now() - sent.at < LATE_MS) {
      deliver(sent).then((problem) => problem || isShown(sent.conversation) || leave(sent.conversation));
    } else {
      putBack(sent.conversation, sent.written);
      sessionStorage.removeItem(name);
    }
  }
}

/** told: called when the server has taken the message, or refused it. */
async function deliver({ conversation, from, body, written, content = contentOf(written), key }, told = () => {}) {
  const turn = begin(conversation, body, [{ type: "message", role: "user", content }], key);
  if (from === null) {
    const early = await Promise.race([turn.begun, sleep(SHOWN_MS)]);
    if (!early && isShown(null)) go("chat", conversation);
  }
  const problem = await turn.begun;
  told();
  if (problem) {
    const home = from === null && (await isRemoved(conversation)) ? null : conversation;
    putBack(home, written);
    forget(turn);
    draftOf(home).refusal.set(problem);
    if (home === null && isShown(conversation)) replace("chat");
  }
  sessionStorage.removeItem(SENT + conversation);
  return problem;
}

const isShown = (id) => route.get().page === "chat" && route.get().id === id;

/** Take what was written out of its box, unless that holds something else by now. */
function takeOut(id, written) {
  const { text, files } = draftOf(id);
  if (text.get() === written.text) text.set("");
  files.set(files.get().filter((each) => !written.files.includes(each)));
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
