// The conversation: every question sends all turns before it, since the server keeps nothing.

import { AnswerView, splitThoughts } from "./answer.js";
import { Unreachable, call, events, warningsOf } from "./api.js";
import { byId, number } from "./dom.js";
import { boxesIn } from "./grounding.js";
import { jobForm, Needed } from "./job.js";
import { modelCard, onOffer, takesPictures, takesVideo } from "./offer.js";
import { allTaken, markSent, pictures, requirePicture, shown, waiting } from "./picture.js";
import { LONGEST, QuestionView } from "./question.js";
import { readFrom, wireReading } from "./reading.js";
import { formOf, namesIn } from "./request.js";
import { modelName } from "./server.js";
import { begin, onTalk, save, saveSoon, showPicture, talk } from "./talk.js";

const LONGEST_ANSWER = 1_000_000; // characters, reasoning included; no context is as long

const transcript = byId("transcript");
const question = byId("question");
const empty = byId("ask-empty");
const views = new WeakMap(); // of turns
let job = null;

export function wireChat() {
  job = jobForm(byId("ask-form"), ask);
  wireReading();
  question.maxLength = LONGEST;
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
  byId("new-conversation").addEventListener("click", () => {
    begin(shown());
    question.focus();
  });
  onTalk(() => {
    job.stop();
    job.clear();
    draw();
    for (const turn of talk().turns) if (turn.role === "assistant") views.get(turn).finish();
    readFrom(lastQuestion());
  });
  let seen = takesPictures();
  onOffer(() => {
    if (seen !== takesPictures() && pictures().length) begin(); // another model, which can't see them
    seen = takesPictures();
  });
}

/** Shows the turns of the conversation; those that are shown already stay the elements that they are. */
function draw() {
  const mine = talk();
  const wanted = mine.turns.map((turn) => {
    if (!views.has(turn)) views.set(turn, viewOf(turn, mine));
    return views.get(turn).node;
  });
  if (!wanted.length) wanted.push(empty);
  for (const node of [...transcript.children]) if (!wanted.includes(node)) node.remove();
  for (const node of wanted) if (node.parentNode !== transcript) transcript.append(node);
  markSent(new Set(mine.turns.flatMap((turn) => turn.pictures ?? [])));
}

function viewOf(turn, mine) {
  if (turn.role === "user") {
    const askAgain = (text) => job.run((signal) => reask(mine, turn, text, signal));
    return new QuestionView(turn, { pictures, show: showPicture, askAgain });
  }
  const again = () => {
    const asked = mine.turns[mine.turns.indexOf(turn) - 1];
    job.run((signal) => reask(mine, asked, asked.text, signal));
    question.focus(); // the button is gone
  };
  return new AnswerView(turn, { pictures, again, moved: () => save(mine) });
}

async function ask(signal) {
  const text = question.value.trim();
  if (!text) {
    question.focus();
    return "Write a question first";
  }
  const mine = talk();
  await allTaken(); // a picture that was dropped just before goes with its question
  await checkSight(mine, signal);
  const asked = { role: "user", text, pictures: waiting().map(({ id }) => id) };
  if (question.value.trim() === text) question.value = ""; // what was typed meanwhile stays
  try {
    return await answer(mine, [...mine.turns, asked], signal);
  } catch (error) {
    if (mine === talk() && !mine.turns.includes(asked)) question.value ||= text; // ask again as it is
    throw error;
  }
}

/** Asks a question of the conversation again; what followed it goes. */
async function reask(mine, asked, text, signal) {
  await checkSight(mine, signal);
  const before = mine.turns.slice(0, mine.turns.indexOf(asked));
  return answer(mine, [...before, { ...asked, text }], signal);
}

/** Throws `Needed` where the model, which is asked for first, can't see what the conversation is about. */
async function checkSight(mine, signal) {
  await modelName({ signal });
  signal.throwIfAborted(); // another conversation may have been chosen meanwhile
  const films = pictures().some(({ kind }) => kind === "video");
  if (films && !takesVideo()) {
    throw new Needed("This conversation has a video, and this model does not understand videos. Begin a new conversation.");
  }
  if (!takesPictures()) {
    if (pictures().length) {
      throw new Needed("This conversation is about pictures, and this model can't see. Begin a new conversation.");
    }
    return;
  }
  const needed = modelCard().training?.min_images ?? 0; // until the model is loaded the server decides
  if (pictures().length < needed) requirePicture();
}

async function answer(mine, turns, signal) {
  const before = mine.turns;
  const its = pictures();
  const reply = { role: "assistant", text: "", reasoning: "", model: modelCard().id ?? "Model", note: "broke off", boxes: [] };
  const state = { content: "", reasoning: "", finish: null, usage: null, warning: "" };
  mine.turns = [...turns, reply];
  draw();
  const view = views.get(reply);
  view.grow();
  transcript.classList.add("busy");
  readFrom(lastQuestion());
  save(mine, its); // the question survives a reload, whatever becomes of its answer
  try {
    await stream(turns, its, signal, state, () => {
      Object.assign(reply, thoughtsOf(state));
      view.grow();
      saveSoon(mine);
    });
    reply.note = noteOf(reply, state);
    return figures(state);
  } catch (error) {
    if (error.name === "AbortError") reply.note = "stopped";
    if (!reply.text && !reply.reasoning) mine.turns = before; // nothing was answered
    throw error;
  } finally {
    reply.boxes = boxesOf(reply, turns, its);
    view.finish();
    transcript.classList.remove("busy");
    if (mine === talk()) draw();
    if (!mine.gone) save(mine, its);
  }
}

const lastQuestion = () => [...transcript.querySelectorAll(".turn.user")].at(-1);

function thoughtsOf({ content, reasoning }) {
  const split = splitThoughts(content);
  return { text: split.text, reasoning: reasoning + split.reasoning };
}

function noteOf(reply, { finish, warning }) {
  if (finish === "length") return [warning, "cut at its token limit"].filter(Boolean).join(". ");
  return reply.text.trim() ? warning : "the model answered nothing";
}

/** Boxes of the answer; `turns` end with its question. */
function boxesOf(reply, turns, its) {
  const asked = turns.map((turn) => (turn.pictures ?? []).map((id) => its.find((picture) => picture.id === id)));
  const all = asked.flat().filter(Boolean);
  const recent = asked.filter((some) => some.length).at(-1)?.[0] ?? null;
  return boxesIn(reply.text, turns.at(-1).text, all, recent, modelCard().grounding);
}

async function stream(turns, its, signal, state, show) {
  const form = await formOf(await modelName(), turns, its);
  signal.throwIfAborted(); // another conversation may have been chosen meanwhile
  const response = await call("v1/chat/completions", { method: "POST", body: form, signal });
  state.warning = warningsOf(response, await namesIn(form)).join(". ");
  for await (const chunk of events(response)) {
    state.usage = chunk.usage ?? state.usage;
    const choice = chunk.choices?.[0];
    const { content, reasoning_content: reasoning } = choice?.delta ?? {};
    state.content += content ?? "";
    state.reasoning += reasoning ?? "";
    if (content || reasoning) show();
    state.finish = choice?.finish_reason ?? state.finish;
    if (state.content.length + state.reasoning.length > LONGEST_ANSWER) state.finish ??= "length";
    if (state.content.length + state.reasoning.length > LONGEST_ANSWER) break;
  }
  if (state.finish === null) {
    throw new Unreachable("The connection to the server broke off before the answer was complete.");
  }
}

function figures({ usage }) {
  if (!usage) return "";
  return `${number(usage.prompt_tokens)} tokens read, ${number(usage.completion_tokens)} written`;
}
