// Puts the events of a response together again: what it looks like after each of them.

/** A response of which nothing is known yet. `items` are its output, also those under way. */
export const empty = () => ({ response: null, items: [], status: "queued" });

/** Take one event in; the state is changed in place, so that a long text is not copied for every piece of it. */
export function take(state, event) {
  const { type } = event;
  if (event.response) {
    state.response = event.response;
    state.status = event.response.status;
    for (const [index, item] of (event.response.output ?? []).entries()) state.items[index] = item;
    return;
  }
  if (type === "response.output_item.added" || type === "response.output_item.done") {
    state.items[event.output_index] = type.endsWith("added") ? structuredClone(event.item) : event.item;
    state.status = "in_progress";
    return;
  }
  const item = state.items[event.output_index];
  if (!item) return;
  const change = CHANGES[type];
  if (change) return change(item, event);
  const step = /^response\.[a-z_]+\.(in_progress|searching|interpreting|generating|calling)$/.exec(type);
  if (step) item.status = step[1];
}

const part = (item, event, type) => {
  item.content ??= [];
  return (item.content[event.content_index] ??= { type, text: "" });
};
const summary = (item, event) => {
  item.summary ??= [];
  return (item.summary[event.summary_index] ??= { type: "summary_text", text: "" });
};
const add = (field) => (item, event) => {
  item[field] = (item[field] ?? "") + event.delta;
};

const CHANGES = {
  "response.content_part.added": (item, event) => {
    item.content ??= [];
    item.content[event.content_index] = structuredClone(event.part);
  },
  "response.content_part.done": (item, event) => {
    item.content[event.content_index] = event.part;
  },
  "response.output_text.delta": (item, event) => {
    part(item, event, "output_text").text += event.delta;
  },
  "response.output_text.done": (item, event) => {
    part(item, event, "output_text").text = event.text;
  },
  "response.output_text.annotation.added": (item, event) => {
    (part(item, event, "output_text").annotations ??= []).push(event.annotation);
  },
  "response.refusal.delta": (item, event) => {
    const found = part(item, event, "refusal");
    found.refusal = (found.refusal ?? "") + event.delta;
  },
  "response.reasoning_text.delta": (item, event) => {
    part(item, event, "reasoning_text").text += event.delta;
  },
  "response.reasoning_summary_text.delta": (item, event) => {
    summary(item, event).text += event.delta;
  },
  "response.function_call_arguments.delta": add("arguments"),
  "response.mcp_call_arguments.delta": add("arguments"),
  "response.custom_tool_call_input.delta": add("input"),
  "response.code_interpreter_call_code.delta": add("code"),
};

/** The text of a message's parts, or of a reasoning item's. */
export const textOf = (item) =>
  [...(item.summary ?? []), ...(typeof item.content === "string" ? [{ text: item.content }] : item.content ?? [])]
    .map((each) => each?.text ?? each?.refusal ?? "")
    .filter(Boolean)
    .join("\n\n");

/** Whether an item answers a call, or a request for approval. */
export const isOutput = (item) => /_output$|^mcp_approval_response$/.test(item.type);
