// ollama-js: a chat with a picture and a tool.
//
// Packages: ollama
// Ran: `list` and `show`; a streamed picture; a typed answer; two turns with a tool, every message kept
import assert from "node:assert";
import { Ollama } from "ollama";

const about = JSON.parse(process.argv[2]);
const [pocket, willing] = [new Ollama({ host: about.server }), new Ollama({ host: about.willing })];
const images = [about.data_url.split(",")[1]];
const model = "pocket";
assert((await pocket.list()).models.length);
assert((await pocket.show({ model })).capabilities.includes("vision"));
let first = "";
const messages = [{ role: "user", content: about.first, images }];
for await (const part of await pocket.chat({ model, messages, stream: true })) first += part.message.content;
const asked = [{ role: "user", content: about.structure, images }];
const typed = await pocket.chat({ model, messages: asked, format: about.schema });

const turns = [];
const history = [];
for (const message of [{ role: "user", content: about.tool_question, images }, { role: "user", content: about.second }]) {
  history.push(message);
  const answer = await willing.chat({ model, messages: history, tools: [about.tool], keep_alive: "10m" });
  const call = answer.message.tool_calls[0].function;
  history.push(answer.message, { role: "tool", tool_name: call.name, content: about.tool_answer });
  const after = await willing.chat({ model, messages: history, tools: [about.tool] });
  history.push(after.message);
  turns.push({ call, after: after.message.content });
}
console.log(JSON.stringify({
  first, structured: JSON.parse(typed.message.content),
  turns: turns.map(({ call, after }) => ({ call: { name: call.name, arguments: call.arguments }, after })),
}));
