// The conversation: every turn sends all turns before it, since the server keeps nothing.

import { call, events, Unreachable } from "./api.js";
import { byId, make, number } from "./dom.js";
import { jobForm } from "./job.js";
import { onOffer, takesPictures } from "./offer.js";
import { dataUrl, onPicture, requirePicture } from "./picture.js";
import { modelName } from "./server.js";

const transcript = byId("transcript");
const question = byId("question");
const empty = byId("ask-empty");
let turns = []; // as /v1/chat/completions takes them
let conversation = 0; // grows with each new one, so that a late answer cannot join the next

export function wireChat() {
  const job = jobForm(byId("ask-form"), ask);
  question.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    job.run();
  });
  for (const chip of empty.querySelectorAll(".chip")) {
    chip.addEventListener("click", () => {
      question.value = chip.textContent;
      question.focus();
      job.run();
    });
  }
  const restart = () => {
    job.stop();
    job.clear();
    startAgain();
  };
  byId("new-conversation").addEventListener("click", () => {
    restart();
    question.focus();
  });
  onPicture(restart);
  let seen = takesPictures();
  onOffer(() => {
    if (seen !== takesPictures()) restart(); // another model, and perhaps a picture that it can't see
    seen = takesPictures();
  });
}

function startAgain() {
  conversation += 1;
  turns = [];
  transcript.replaceChildren(empty);
}

async function ask(signal) {
  const text = question.value.trim();
  if (!text) {
    question.focus();
    return "Write a question first";
  }
  const picture = takesPictures() ? requirePicture() : null;
  const mine = conversation;
  const content = [{ type: "text", text }];
  if (picture && !turns.length) content.unshift({ type: "image_url", image_url: { url: await dataUrl(picture) } });
  signal.throwIfAborted(); // another picture may have come meanwhile
  const asked = [...turns, { role: "user", content }];
  empty.remove();
  const shown = addTurn("You", "user", text);
  const answer = addTurn("Model", "assistant", "");
  question.value = "";
  const reply = { text: "", finish: null, usage: null };
  try {
    await stream(asked, signal, reply, (piece) => append(answer, piece));
    return figures(reply);
  } catch (error) {
    if (!reply.text && mine === conversation) {
      shown.turn.remove();
      answer.turn.remove();
      question.value ||= text; // nothing was answered: ask again as it is
      if (!turns.length) transcript.replaceChildren(empty);
    } else if (reply.text) note(answer, error.name === "AbortError" ? "stopped" : "broke off");
    throw error;
  } finally {
    answer.turn.classList.remove("busy");
    if (reply.text && mine === conversation) {
      turns = [...asked, { role: "assistant", content: reply.text }];
    }
    if (reply.finish === "length") note(answer, "cut at its token limit");
  }
}

async function stream(messages, signal, reply, show) {
  const body = { model: await modelName(), messages, stream: true, stream_options: { include_usage: true } };
  const response = await call("v1/chat/completions", {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify(body),
    signal,
  });
  for await (const chunk of events(response)) {
    reply.usage = chunk.usage ?? reply.usage;
    const choice = chunk.choices?.[0];
    const piece = choice?.delta?.content;
    if (piece) {
      reply.text += piece;
      show(piece);
    }
    reply.finish = choice?.finish_reason ?? reply.finish;
  }
  if (reply.finish === null) {
    throw new Unreachable("The connection to the server broke off before the answer was complete.");
  }
}

function addTurn(who, role, text) {
  const body = make("div", { class: "turn-text", text });
  const turn = make("div", { class: `turn ${role}` }, make("p", { class: "turn-who", text: who }), body);
  if (role === "assistant") turn.classList.add("busy");
  transcript.append(turn);
  transcript.scrollTop = transcript.scrollHeight;
  return { turn, body };
}

/** Adds to an answer; as a text node of its own, so that a screen reader reads only what is new. */
function append({ body }, piece) {
  const following = transcript.scrollHeight - transcript.scrollTop - transcript.clientHeight < 40;
  body.append(piece);
  if (following) transcript.scrollTop = transcript.scrollHeight;
}

function note({ turn }, text) {
  turn.append(make("p", { class: "turn-note muted small", text: `(${text})` }));
}

function figures({ usage }) {
  if (!usage) return "";
  return `${number(usage.prompt_tokens)} tokens read, ${number(usage.completion_tokens)} written`;
}
