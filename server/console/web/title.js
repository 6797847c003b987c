// What a conversation is called: its title, or what was said first in one that has none, as those of SDKs.

import { html, useEffect, useRef, useState } from "./vendor/standalone.module.js";
import { get, watched } from "./api.js";
import { textOf } from "./fold.js";

const LONGEST = 80;

/** What was said first, by the id of a conversation: {text, at}, where the text of nothing holds until it is changed. */
const said = new Map();
let last = Promise.resolve();

/** How often it was learned what was said first somewhere: whoever looks for a name looks again then. */
export const learned = watched(0);

const given = ({ title, metadata }) => title || metadata?.title;

function isKnown(conversation) {
  const { text, at } = said.get(conversation.id) ?? {};
  return Boolean(given(conversation) || text || at === conversation.updated_at);
}

/** Ask for what was said first, behind all other questions: a list has many conversations. */
function ask(conversation) {
  const { id, updated_at: at } = conversation;
  last = last.then(async () => {
    if (isKnown(conversation)) return;
    const { data } = await get(`v1/conversations/${id}/items`, { limit: 5, order: "asc" });
    const first = data.find((item) => item.type === "message" && item.role === "user");
    said.set(id, { text: first ? textOf(first).replace(/\s+/g, " ").trim().slice(0, LONGEST) : "", at });
    learned.set(learned.get() + 1);
  });
  return (last = last.catch(() => {})); // it is gone, or the server is away
}

export const called = (conversation) => given(conversation) || said.get(conversation.id)?.text || "Untitled";

/** The title that the console gives a conversation which begins with this content. */
export const titleOf = (content) => {
  const parts = typeof content === "string" ? [{ type: "input_text", text: content }] : content;
  const text = parts?.find((part) => part.type === "input_text")?.text ?? parts?.find((part) => part.filename)?.filename ?? "Chat";
  return text.replace(/\s+/g, " ").trim().slice(0, LONGEST) || "Chat";
};

/** Whether a conversation is called so, or may be: of one that is seen its name is asked for. */
export const isCalled = (conversation, words) =>
  `${called(conversation)} ${conversation.id}`.toLowerCase().includes(words.toLowerCase()) || !isKnown(conversation);

/** The name of a conversation, which is asked for as soon as it is in sight. */
export function Title({ conversation }) {
  const { id, updated_at: at } = conversation;
  const place = useRef();
  const [, redraw] = useState(0);
  const known = isKnown(conversation);
  useEffect(() => {
    if (known) return undefined;
    let there = true;
    const observer = new IntersectionObserver((seen) => {
      if (!seen.some((each) => each.isIntersecting)) return;
      observer.disconnect();
      ask(conversation).then(() => there && redraw((count) => count + 1));
    });
    observer.observe(place.current);
    return () => {
      there = false;
      observer.disconnect();
    };
  }, [id, at, known]);
  return html`<span ref=${place}>${called(conversation)}</span>`;
}
