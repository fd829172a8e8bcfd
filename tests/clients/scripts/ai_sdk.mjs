// The AI SDK with its openai, openai-compatible and anthropic providers.
//
// Packages: ai @ai-sdk/openai @ai-sdk/openai-compatible @ai-sdk/anthropic zod
// Ran: over OpenAI's chat and Responses, the compatible provider and Anthropic's: a streamed picture, a typed
// answer, two turns with a tool whose parameters hold a `z.record`, every message kept; a forced call
import assert from "node:assert";
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, Output, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

globalThis.AI_SDK_LOG_WARNINGS = false; // they go to standard output
const about = JSON.parse(process.argv[2]);
const models = (server) => {
  const options = { baseURL: `${server}/v1`, apiKey: "none" };
  const openai = createOpenAI(options);
  const compatible = createOpenAICompatible({ ...options, name: "snugvl", supportsStructuredOutputs: true });
  return [openai.chat("pocket"), openai.responses("pocket"), compatible("pocket"), createAnthropic(options)("pocket")];
};
const shown = (text) => ({
  role: "user",
  content: [{ type: "image", image: about.data_url }, { type: "text", text }],
});
const shape = z.object({ color: z.enum(["red", "green", "blue"]), count: z.union([z.literal(0), z.literal(1)]) });
const inputSchema = z.object({ shape: z.string(), notes: z.record(z.string(), z.string()).optional() });
const tools = { [about.tool.function.name]: tool({
  description: "Counts the shapes of one kind.", inputSchema, execute: async () => about.tool_answer,
}) };
// Without `store: false` the SDK sends names of items that the server would have to keep.
const once = { maxRetries: 0, providerOptions: { openai: { store: false } } };

const turns = [];
const firsts = [];
const typed = [];
const forced = [];
const willing = models(about.willing);
for (const [index, model] of models(about.server).entries()) {
  firsts.push(await streamText({ ...once, model, messages: [shown(about.first)] }).text);
  const form = Output.object({ schema: shape });
  typed.push((await generateText({ ...once, model, messages: [shown(about.structure)], output: form })).output);
  const only = { [about.tool.function.name]: tool({ description: "", inputSchema: z.object({ shape: z.enum(["circle"]) }) }) };
  forced.push((await generateText({
    ...once, model, messages: [shown(about.structure)], tools: only, toolChoice: "required",
  })).toolCalls[0]);
  const messages = [];
  for (const message of [shown(about.tool_question), { role: "user", content: about.second }]) {
    messages.push(message);
    const result = await generateText({
      ...once, model: willing[index], messages, tools, stopWhen: stepCountIs(3),
    });
    messages.push(...result.response.messages);
    const call = result.steps[0].toolCalls[0];
    turns.push({ call: { name: call.toolName, arguments: call.input }, after: result.text });
  }
}
assert(typed.every((each) => shape.safeParse(each).success));
console.log(JSON.stringify({
  first: firsts[3], turns, structured: typed[0],
  forced: { name: forced[0].toolName, arguments: forced[0].input },
}));
