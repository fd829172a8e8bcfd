// The official openai SDK for Node.
//
// Packages: openai
// Ran: a streamed conversation about a picture, a typed answer, a forced call and its answer
import assert from "node:assert";
import OpenAI from "openai";

// `node openai_sdk.mjs ABOUT_JSON`: what about.py says, in JSON.
const about = JSON.parse(process.argv[2]);
const client = new OpenAI({ baseURL: `${about.server}/v1`, apiKey: "none", maxRetries: 0 });
const content = (text) => [
  { type: "image_url", image_url: { url: about.data_url } },
  { type: "text", text },
];

const history = [{ role: "user", content: content(about.first) }];
const pieces = [];
let usage;
const stream = await client.chat.completions.create({
  model: "pocket", messages: history, stream: true, stream_options: { include_usage: true },
});
for await (const chunk of stream) {
  if (chunk.choices.length) pieces.push(chunk.choices[0].delta.content ?? "");
  usage = chunk.usage ?? usage;
}
assert(usage.completion_tokens > 0);

history.push({ role: "assistant", content: pieces.join("") }, { role: "user", content: about.second });
const second = await client.chat.completions.stream({ model: "pocket", messages: history }).finalContent();

const structured = await client.chat.completions.create({
  model: "pocket",
  messages: [{ role: "user", content: content(about.structure) }],
  response_format: { type: "json_schema", json_schema: { name: "shape", schema: about.schema, strict: true } },
});

const asked = [{ role: "user", content: content(about.tool_question) }];
const called = await client.chat.completions
  .stream({ model: "pocket", messages: asked, tools: [about.tool], tool_choice: "required" })
  .finalMessage();
const call = called.tool_calls[0];
asked.push({ role: "assistant", content: called.content, tool_calls: called.tool_calls });
for (const each of called.tool_calls) {
  asked.push({ role: "tool", tool_call_id: each.id, content: about.tool_answer });
}
const after = await client.chat.completions.create({
  model: "pocket", messages: asked, tools: [about.tool], max_tokens: 20,
});

console.log(JSON.stringify({
  pieces,
  second,
  structured: JSON.parse(structured.choices[0].message.content),
  call: { name: call.function.name, arguments: JSON.parse(call.function.arguments) },
  after: after.choices[0].message.content,
}));
