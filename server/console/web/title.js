// What a conversation is called: its title, or what was said first in one that has none, as those of SDKs.

import { html, useEffect, useState } from "./vendor/standalone.module.js";
import { get } from "./api.js";
import { textOf } from "./fold.js";

const LONGEST = 80;

/** What was said first, by the id of a conversation. */
const said = new Map();
let last = Promise.resolve();

/** Ask for what was said first, behind all other questions: a list has many conversations. */
function ask(id) {
  last = last.then(async () => {
    if (said.has(id)) return;
    const { data } = await get(`v1/conversations/${id}/items`, { limit: 5, order: "asc" });
    const first = data.find((item) => item.type === "message" && item.role === "user");
    if (first) said.set(id, textOf(first).replace(/\s+/g, " ").trim().slice(0, LONGEST));
  });
  return (last = last.catch(() => {})); // it is gone, or the server is away
}

export const called = (conversation) => conversation.title || said.get(conversation.id) || "Untitled";

export function Title({ conversation }) {
  const { id, title } = conversation;
  const [, redraw] = useState(0);
  useEffect(() => {
    if (title || said.has(id)) return undefined;
    let seen = true;
    ask(id).then(() => seen && redraw((count) => count + 1));
    return () => {
      seen = false;
    };
  }, [id, title]);
  return html`${called(conversation)}`;
}
