// The official JavaScript SDK and the Vercel AI SDK, unmodified, against servers of their own: one on the scripted
// engine, one with the shipped model, which decides by itself what to call.
// `make test-js`. `node check.mjs scripted` leaves out the shipped model: `make test` runs that where Node is there.

import assert from "node:assert/strict";

import { createOpenAI } from "@ai-sdk/openai";
import { generateText, stepCountIs, streamText, tool } from "ai";
import OpenAI from "openai";
import { z } from "zod";

import { against, all, MODEL } from "./serving.mjs";

globalThis.AI_SDK_LOG_WARNINGS = false;

const CALL = 'call get_weather {"city": "Paris"}';
const WEATHER = {
  type: "function",
  name: "get_weather",
  strict: true,
  parameters: {
    type: "object",
    properties: { city: { type: "string" } },
    required: ["city"],
    additionalProperties: false,
  },
};

const checks = {
  async "create and read back"({ client }) {
    const response = await client.responses.create({ model: MODEL, input: "say hello" });
    assert.equal(response.output_text, "hello");
    assert.equal((await client.responses.retrieve(response.id)).output_text, "hello");
  },

  async "a stream is read again from every event on"({ client }) {
    const input = "think hm then say one two";
    const events = await all(await client.responses.create({ model: MODEL, input, stream: true }));
    const { id } = events[0].response;
    for (let after = 0; after < events.length; after++) {
      const tail = await client.responses.retrieve(id, { stream: true, starting_after: after });
      assert.deepEqual(await all(tail), events.slice(after + 1));
    }
    const resumed = client.responses.stream({ response_id: id, starting_after: 4 });
    assert.equal((await resumed.finalResponse()).output_text, "one two");
  },

  async "the stream helper folds a call, and its output continues"({ client }) {
    const stream = client.responses.stream({ model: MODEL, input: CALL, tools: [WEATHER] });
    let said = "";
    stream.on("response.function_call_arguments.delta", (event) => (said += event.delta));
    const final = await stream.finalResponse();
    assert.deepEqual(JSON.parse(said), { city: "Paris" });
    const output = { type: "function_call_output", call_id: final.output[0].call_id, output: "rainy" };
    const next = await client.responses.create({ model: MODEL, previous_response_id: final.id, input: [output] });
    assert.equal(next.output_text, "The tool said: rainy");
    assert.equal((await all(client.responses.inputItems.list(next.id))).length, 1);
    await client.responses.delete(next.id);
    await assert.rejects(client.responses.retrieve(next.id), OpenAI.NotFoundError);
  },

  async "background and poll"({ client }) {
    let response = await client.responses.create({ model: MODEL, input: "say hello", background: true });
    while (["queued", "in_progress"].includes(response.status)) {
      response = await client.responses.retrieve(response.id);
    }
    assert.equal(response.output_text, "hello");
  },

  async "conversations"({ client }) {
    const conversation = await client.conversations.create({ items: [{ role: "user", content: "hi" }] });
    await client.responses.create({ model: MODEL, input: "say hello", conversation: conversation.id });
    const items = client.conversations.items.list(conversation.id, { order: "asc", limit: 1 });
    assert.deepEqual((await all(items)).map((item) => item.role), ["user", "user", "assistant"]);
  },

  async "chat"({ client }) {
    const asked = { model: MODEL, messages: [{ role: "user", content: "say hello" }] };
    assert.equal((await client.chat.completions.create(asked)).choices[0].message.content, "hello");
    const final = await client.chat.completions.stream(asked).finalChatCompletion();
    assert.equal(final.choices[0].message.content, "hello");
  },

  async "the AI SDK runs its tools"({ baseURL }) {
    const provider = createOpenAI({ baseURL, apiKey: "unused" });
    const execute = async ({ city }) => `sunny in ${city}`;
    const get_weather = tool({ description: "Weather", inputSchema: z.object({ city: z.string() }), execute });
    for (const [model, store] of [
      [provider.responses(MODEL), true],
      [provider.responses(MODEL), false],
      [provider.chat(MODEL), false],
    ]) {
      const options = {
        model,
        prompt: `think hm then ${CALL}`,
        tools: { get_weather },
        stopWhen: stepCountIs(3),
        maxRetries: 0,
        providerOptions: { openai: { store } },
      };
      assert.equal((await generateText(options)).text, "The tool said: sunny in Paris");
      assert.equal((await all(streamText(options).textStream)).join(""), "The tool said: sunny in Paris");
    }
  },
};

const tiny = {
  async "the AI SDK's loop on the shipped model"({ baseURL }) {
    const provider = createOpenAI({ baseURL, apiKey: "unused" });
    const called = [];
    const get_weather = tool({
      description: "Get the weather in a city.",
      inputSchema: z.object({ city: z.string() }),
      execute: async ({ city }) => (called.push(city), "sunny"),
    });
    for (const model of [provider.responses("antiphon-tiny"), provider.chat("antiphon-tiny")]) {
      const prompt = "What's the weather in Tokyo?";
      const { text } = await generateText({
        model, prompt, tools: { get_weather }, stopWhen: stepCountIs(3), maxRetries: 0, temperature: 0,
      });
      assert.equal(text, "The weather in Tokyo is sunny.");
    }
    assert.deepEqual(called, ["Tokyo", "Tokyo"]);
  },
};

await against(["--engine", "scripted"], checks);
if (process.argv[2] !== "scripted") await against([], tiny);
