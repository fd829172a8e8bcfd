// openai-node: `parse`, the stream helper, and `runTools`, whose messages go back into the history as they are.
//
// Packages: openai zod
// Ran: a picture; `parse` with a zod schema; two turns of `runTools`, streamed, every message kept; a forced call;
// Responses with a tool, every output item sent back
import OpenAI from "openai";
import { zodResponseFormat } from "openai/helpers/zod";
import { z } from "zod";

const about = JSON.parse(process.argv[2]);
const client = (server) => new OpenAI({ baseURL: `${server}/v1`, apiKey: "none", maxRetries: 0 });
const [pocket, willing] = [client(about.server), client(about.willing)];
const shown = (text) => ({
  role: "user",
  content: [{ type: "image_url", image_url: { url: about.data_url } }, { type: "text", text }],
});
const model = "pocket";
const described = await pocket.chat.completions.stream({ model, messages: [shown(about.first)] }).finalMessage();
const shape = z.object({ color: z.enum(["red", "green", "blue"]), count: z.union([z.literal(0), z.literal(1)]) });
const parsed = await pocket.chat.completions.parse({
  model,
  messages: [shown(about.first), described, { role: "user", content: about.structure }],
  response_format: zodResponseFormat(shape, "shape"),
});
const asked = [shown(about.tool_question)];
const must = { model, tools: [about.tool], tool_choice: "required" };
const called = await pocket.chat.completions.stream({ ...must, messages: asked }).finalMessage();
asked.push(called);
for (const { id } of called.tool_calls) asked.push({ role: "tool", tool_call_id: id, content: about.tool_answer });
await pocket.chat.completions.create({ model, messages: asked, tools: [about.tool], max_tokens: 20 });

const tools = [{
  type: "function",
  function: { ...about.tool.function, parse: JSON.parse, function: () => about.tool_answer },
}];
const turns = [];
let messages = [];
for (const message of [shown(about.tool_question), { role: "user", content: about.second }]) {
  const before = messages.length;
  const runner = willing.chat.completions.runTools({ model, messages: [...messages, message], tools, stream: true });
  const after = await runner.finalContent();
  messages = runner.messages;
  const call = messages.slice(before).find((each) => each.tool_calls?.length).tool_calls[0].function;
  turns.push({ call: { name: call.name, arguments: JSON.parse(call.arguments) }, after });
}
const flat = [{ type: "function", strict: false, ...about.tool.function }];
const input = [{ role: "user", content: about.tool_question }];
let response = await willing.responses.create({ model, input, tools: flat });
const call = response.output.find((item) => item.type === "function_call");
input.push(...response.output, { type: "function_call_output", call_id: call.call_id, output: about.tool_answer });
response = await willing.responses.create({ model, input, tools: flat });
turns.push({ call: { name: call.name, arguments: JSON.parse(call.arguments) }, after: response.output_text });
console.log(JSON.stringify({
  first: described.content, turns, structured: parsed.choices[0].message.parsed,
  forced: { name: called.tool_calls[0].function.name, arguments: JSON.parse(called.tool_calls[0].function.arguments) },
}));
