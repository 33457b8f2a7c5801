// Three turns with a tool through the AI SDK: `node ai-sdk.mjs WAY BASE_URL MODEL`.
// Ways: chat, responses (its default, which refers to items by id), unstored, compatible.
// Prints what the model answers to each turn, one line each.
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

globalThis.AI_SDK_LOG_WARNINGS = false;
const [way, baseURL, id] = process.argv.slice(2);
const settings = { baseURL: `${baseURL}/v1`, apiKey: "unused" };
const models = {
  chat: () => createOpenAI(settings).chat(id),
  responses: () => createOpenAI(settings)(id),
  unstored: () => createOpenAI(settings)(id),
  compatible: () => createOpenAICompatible({ name: "evenflow", ...settings })(id),
};
const weather = tool({
  description: "Tells the weather.",
  inputSchema: z.object({ city: z.string() }),
  execute: async ({ city }) => `Sunny in ${city}.`,
});
const asked = {
  model: models[way](),
  tools: { weather },
  stopWhen: stepCountIs(2),
  maxRetries: 0,
  providerOptions: {
    openai: { reasoningEffort: "low", ...(way === "unstored" && { store: false }) },
    evenflow: { reasoningEffort: "low" },
  },
};

const messages = [];
for (const city of ["Oslo", "Rome", "Bern"]) {
  messages.push({ role: "user", content: `Weather in ${city}?` });
  const whole = await generateText({ ...asked, messages });
  messages.push(...whole.response.messages);
  console.log(whole.text);
  messages.push({ role: "user", content: "Are you sure?" });
  const streamed = streamText({ ...asked, messages, onError: ({ error }) => { throw error; } });
  console.log(await streamed.text);
  messages.push(...(await streamed.response).messages);
}
