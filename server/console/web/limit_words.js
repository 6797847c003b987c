// Limits in words: those of a key or an owner, as the API has them by their names.

import { number, size } from "./elements.js";

const PERIODS = { second: "a second", minute: "a minute", day: "a day" };
const OTHERS = {
  concurrent_requests: (value) => `${number(value)} requests at once`,
  concurrent_streams: (value) => `${number(value)} streams at once`,
  queued_responses: (value) => `${number(value)} responses queued`,
  stored_bytes: (value) => `${size(value)} stored`,
  total_tokens: (value) => `${number(value)} tokens in all`,
  total_cost: (value) => `costs of ${value} in all`,
};

function words(name, value) {
  if (OTHERS[name]) return OTHERS[name](value);
  const [, unit, period] = /^(.+)_per_(\w+)$/.exec(name) ?? [];
  if (unit) return `${number(value)} ${unit.replaceAll("_", " ")} ${PERIODS[period]}`;
  return `${name.replaceAll("_", " ")} ${Array.isArray(value) ? value.join(", ") : value}`;
}

/** What limits say, one text each, those of single models with the model's name. */
export function limitWords({ models = {}, ...limits } = {}) {
  const own = Object.entries(limits).map(([name, value]) => words(name, value));
  const of = Object.entries(models).flatMap(([model, each]) => limitWords(each).map((said) => `${said} of ${model}`));
  return [...own, ...of];
}

const SPANS = [[1, "a second"], [60, "a minute"], [86_400, "a day"]];

/** The period of a rate, of so many seconds. */
export const periodWords = (seconds) => SPANS.find(([span]) => span === seconds)?.[1] ?? `each ${number(seconds)} s`;
