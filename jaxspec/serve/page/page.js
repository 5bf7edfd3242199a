// The page of `jaxspec serve`: chat with pictures, and see which tokens were drafted.
// What is said is in `chat`, which `draw` shows and the browser keeps: turns of a question and its
// answers (two in a race). An answer holds runs, [text, kind, whether it is reasoning]. The kind
// says who wrote a run: "" the target, "0" the first source, "several" sources.

import markdownit from "./markdown-it/markdown-it.js";

const $ = (id) => document.getElementById(id);
const LARGEST = 2 ** 22; // pixels of a picture; larger ones are scaled down before they are sent
const WEEK = 7 * 24 * 3600e3; // ms that chats of closed tabs are kept
const OPTIONS = [...$("options").querySelectorAll("input, textarea")];

let model = null; // what /v1/models tells
let chat = { turns: [], first: 0, used: 0 }; // `first` is the first turn that is sent
let pictures = []; // data URLs of the next question
let edited = null; // number of the turn that the next question replaces
let aside = ["", []]; // text and pictures that were in the composer before an edit
let follows = true; // whether the log stays at its end
let running = null; // aborts the answers that are being written

function element(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

function button(text, onclick, label = text) {
  const node = element("button", { type: "button", "aria-label": label }, text);
  node.onclick = () => onclick(node);
  return node;
}

// The server

class Refusal extends Error {
  constructor(message, code) {
    super(message);
    this.code = code;
  }
}

function headers() {
  const key = $("key").value.trim();
  return key ? { Authorization: `Bearer ${key}` } : {};
}

async function reach(path, options = {}) {
  try {
    return await fetch(path, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Error("the server does not answer");
  }
}

async function refusal(response) {
  const { error } = await response.json().catch(() => ({}));
  return new Refusal(error?.message ?? `status ${response.status}`, error?.code);
}

let next; // timer of the next look at the server

// Show the server's state, and look again: soon while it is not ready, else now and then.
async function watch() {
  let ready = false;
  try {
    const health = await (await reach("health", { signal: AbortSignal.timeout(10e3) })).json();
    ready = health.status === "ready";
    if (!ready) {
      model = null; // another one may come back
      about(`${health.status}, ${health.programs} of ${health.of} programs`, "waits");
    } else if (!model) ready = await connect();
  } catch {
    model = null;
    about("the server does not answer; it is asked again every 2 seconds", "dead");
  }
  clearTimeout(next); // of a look that began meanwhile
  next = setTimeout(watch, ready ? 10e3 : 2e3);
}

function about(text, state) {
  if ($("about").textContent !== text) $("about").textContent = text;
  $("about").className = state;
}

async function connect() {
  const response = await reach("v1/models", { headers: headers() });
  if (!response.ok) {
    const { message } = await refusal(response);
    about(message, "dead");
    if (response.status === 401 && $("options").hidden) showWrong($("key"), message);
    return false;
  }
  model = (await response.json()).data[0];
  const { sources, images, new_tokens: most, race, example } = model.jaxspec;
  const drafts = sources.length ? `drafted by ${sources.join(" and ")}` : "no draft";
  about(`${model.id}, ${drafts}`, "ready");
  $("race").hidden = !race;
  $("attach").hidden = images === 0;
  $("example").hidden = !example;
  $("most").max = most;
  $("most").value = Math.min($("most").value || most, most);
  drawLegend(sources);
  if (!running) draw();
  return true;
}

// Yield the events of a streamed answer.
async function* events(options, signal) {
  const response = await reach("v1/chat/completions", {
    method: "POST",
    headers: { "Content-Type": "application/json", ...headers() },
    body: JSON.stringify({ stream: true, trace: true, ...options }),
    signal,
  });
  if (!response.ok) throw await refusal(response);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let text = ""; ; ) {
    const { value, done } = await reader.read();
    if (done) throw new Error("the server ended before the answer was whole");
    const parts = (text + value).split("\n\n");
    text = parts.pop();
    for (const part of parts) {
      const data = part.replace(/^data: /, "");
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error) throw new Refusal(event.error.message, event.error.code);
      yield event;
    }
  }
}

// An answer

const newAnswer = () => ({
  ...{ text: "", runs: [], tokens: [], passes: 0, emitted: 0, decode_ms: 0, prefill_ms: 0 },
  ...{ waiting: null, ended: false, note: "" },
});

// Read a streamed answer into `answer`; `tick` is called after each event.
async function write(answer, options, signal, tick) {
  for await (const event of events(options, signal)) {
    if (event.jaxspec) answer.waiting = event.jaxspec.waiting;
    for (const choice of event.choices) take(answer, choice);
    tick();
  }
  answer.ended = true;
}

function take(answer, { delta, jaxspec: trace }) {
  const { content = "", reasoning_content: thought = "" } = delta;
  answer.text += content;
  if (!trace) return;
  const { tokens, pieces, reasoning, prompt, passes, emitted, decode_ms, prefill_ms } = trace;
  answer.tokens.push(...tokens);
  chat.used = prompt + answer.tokens.length;
  Object.assign(answer, { passes, emitted, decode_ms, prefill_ms });
  if (pieces) {
    pieces.forEach((piece, i) => extend(answer.runs, piece, kindOf(trace, i), reasoning[i]));
  } else {
    extend(answer.runs, thought, "", true);
    extend(answer.runs, content, "", false);
  }
}

function kindOf(trace, i) {
  if (!(trace.place?.[i] >= 0)) return "";
  const agree = (trace.agree?.[i] ?? []).flatMap((yes, source) => (yes ? [source] : []));
  return agree.length > 1 ? "several" : `${agree[0] ?? 0}`;
}

function extend(runs, text, kind, reasons) {
  const last = runs.at(-1);
  if (last && last[1] === kind && last[2] === reasons) last[0] += text;
  else if (text) runs.push([text, kind, reasons]);
}

const pace = ({ emitted, decode_ms }) => (decode_ms ? (1000 * emitted) / decode_ms : 0);
const perPass = ({ emitted, passes }) => (passes ? emitted / passes : 0);
const counted = (count, name, more = "s") => `${count} ${name}${count === 1 ? "" : more}`;
const seconds = (ms) => `${(ms / 1000).toFixed(2)} s`;

// Markdown, in the colours of the runs

const markdown = markdownit({ html: false, breaks: true }).disable(["image", "text_join"]);

function sourceName(kind) {
  return kind ? `drafted by ${model?.jaxspec.sources[kind] ?? kind}` : "written by the target";
}

function coloured(text, kind) {
  const [, before, words, after] = text.match(/^(\s*)(.*?)(\s*)$/s); // no line under a space
  if (!words) return [text];
  const look = kind ? `drafted from-${kind}` : "";
  return [before, element("span", { class: look, title: sourceName(kind) }, words), after];
}

// Return a function that colours texts, which it is given in the order in which the runs have them.
function painter(runs) {
  const source = runs.map(([text]) => text).join("");
  let place = 0;
  return (text) =>
    text.split(/(?<=\n)/).flatMap((line) => {
      const from = source.indexOf(line, place);
      if (from < 0) return [line]; // such as the letter of an entity
      place = from + line.length;
      return slice(runs, from, place).flatMap(([part, kind]) => coloured(part, kind));
    });
}

function slice(runs, from, to) {
  let start = 0;
  return runs.flatMap(([text, kind]) => {
    const part = text.slice(Math.max(from - start, 0), Math.max(to - start, 0));
    start += text.length;
    return part ? [[part, kind]] : [];
  });
}

// Return Markdown as nodes. What is not made here stays text, so no HTML of an answer is HTML.
function rendered(runs) {
  const paint = painter(runs);
  const root = document.createDocumentFragment();
  let parent = root;
  const tokens = markdown.parse(runs.map(([text]) => text).join(""), {});
  for (const token of tokens.flatMap((block) => block.children ?? [block])) {
    if (token.hidden) continue; // paragraphs of short lists
    if (token.nesting < 0) {
      parent = parent.parentNode;
    } else if (token.nesting > 0) {
      parent = parent.appendChild(opened(token));
    } else {
      parent.append(...leaf(token, paint));
    }
  }
  return root;
}

function opened(token) {
  const node = element(token.tag);
  if (token.tag === "a") {
    Object.assign(node, { href: token.attrGet("href"), target: "_blank", rel: "noreferrer" });
  }
  if (token.attrGet("start") !== null) node.start = token.attrGet("start");
  node.style.textAlign = token.attrGet("style")?.replace("text-align:", "") ?? ""; // of a column
  return node;
}

function leaf(token, paint) {
  const text = token.content.replace(/\n$/, "");
  if (token.type === "code_inline") return [element("code", {}, ...paint(text))];
  if (token.tag === "code") return [element("pre", {}, element("code", {}, ...paint(text)))];
  return token.tag ? [element(token.tag)] : paint(text);
}

// Replace children that differ, so that a text that is read or selected stays while more comes.
function replaceChanged(node, children) {
  const before = [...node.childNodes];
  children.forEach((child, i) => {
    if (!before[i]) node.append(child);
    else if (!before[i].isEqualNode(child)) before[i].replaceWith(child);
  });
  before.slice(children.length).forEach((child) => child.remove());
}

// What is said

function draw() {
  $("turns").replaceChildren(...chat.turns.flatMap(drawTurn));
  if (chat.first) chat.turns[chat.first].nodes.question.before(cut());
  $("welcome").hidden = chat.turns.length > 0;
  drawMeters();
}

function cut() {
  const { prompt_tokens: tokens, images } = model?.jaxspec ?? {};
  const limits = `${counted(tokens, "token")}${images ? ` and ${counted(images, "picture")}` : ""}`;
  const why = tokens ? `: a prompt has at most ${limits}` : "";
  const text = `What is above is not sent any more${why}. `;
  return element("p", { class: "cut" }, text, button("New chat", begin));
}

function drawTurn(turn, i) {
  const question = drawQuestion(turn, i);
  const answers = turn.answers.map((_, lane) => drawAnswer(turn.race, lane));
  const reply = drawReply(turn, i, answers);
  turn.nodes = { question, reply, answers };
  for (const node of [question, reply]) node.classList.toggle("left", i < chat.first);
  tell(turn);
  return [question, reply];
}

function drawQuestion({ text, pictures: urls }, i) {
  const images = urls.map((src, j) => element("img", { src, alt: `Picture ${j + 1}` }));
  return element(
    "article",
    { class: "said user" },
    element("h2", { class: "unseen" }, "Your question"),
    element("div", { class: "shown" }, ...images),
    element("p", { class: "text" }, text),
    element("div", { class: "actions" }, button("Edit", () => edit(i), "Edit this question")),
  );
}

function drawReply(turn, i, answers) {
  const copy = (node) => copyText(node, turn.answers.at(-1).text);
  const actions = [button("Copy", copy, "Copy this answer")];
  if (i === chat.turns.length - 1) {
    actions.push(button("Again", () => ask({ ...turn }, i), "Answer this question again"));
  }
  return element(
    "article",
    { class: "said assistant" },
    element("h2", { class: "unseen" }, "Answer"),
    element("div", { class: turn.race ? "lanes" : "" }, ...answers),
    element("p", { class: "verdict" }),
    element("div", { class: "actions" }, ...actions),
  );
}

function drawAnswer(races, lane) {
  const name = element("h3", {}, lane ? "with drafts" : "plain", element("span", {}));
  return element(
    "div",
    { class: races ? "lane" : "" },
    ...(races ? [name] : []),
    element("details", {}, element("summary", {}, "Reasoning"), element("p", {})),
    element("div", { class: "answer" }),
    element("p", { class: "note" }),
  );
}

// Show what is new in a turn's answers.
function tell(turn) {
  turn.answers.forEach((answer, i) => tellAnswer(turn.nodes.answers[i], answer, turn));
  const [plain, drafted] = turn.answers;
  if (!drafted?.ended || !plain.ended) return;
  const same = plain.tokens.join() === drafted.tokens.join();
  const factor = pace(drafted) / pace(plain); // drawn answers differ in length, too
  const verdict = turn.nodes.reply.querySelector(".verdict");
  const speed = factor > 0 && factor < Infinity ? `, ${factor.toFixed(2)} times as fast` : "";
  verdict.textContent = `${same ? "identical" : "different"}${speed}`;
  verdict.classList.toggle("differs", !same && !turn.temperature);
}

function tellAnswer(node, answer, turn) {
  const words = answer.runs.filter(([, , reasons]) => !reasons);
  const thoughts = answer.runs.filter(([, , reasons]) => reasons);
  node.querySelector("details").hidden = !thoughts.length;
  const painted = thoughts.flatMap(([text, kind]) => coloured(text, kind));
  node.querySelector("details p").replaceChildren(...painted);
  const children = [...rendered(words).childNodes];
  if (!answer.runs.length && !answer.note) {
    children.push(element("p", { class: "wait" }, waitText(answer)));
  }
  replaceChanged(node.querySelector(".answer"), children);
  node.querySelector(".note").textContent = noteText(answer, turn);
  if (turn.race) node.querySelector("h3 span").textContent = seconds(answer.decode_ms);
}

function waitText({ waiting }) {
  if (waiting === null) return "Sending ...";
  if (!waiting) return "Reading the prompt ...";
  return `Waiting for a free row: place ${waiting} in the queue`;
}

function noteText(answer, turn) {
  const parts = [];
  if (answer.passes && (answer.ended || answer.note)) {
    parts.push(counted(answer.tokens.length, "token"), counted(answer.passes, "pass", "es"));
    parts.push(`${perPass(answer).toFixed(2)} per pass`);
    parts.push(`prompt ${seconds(answer.prefill_ms)}`, `answer ${seconds(answer.decode_ms)}`);
  }
  if (turn.temperature && answer.ended) parts.push(`seed ${turn.seed}`);
  return [...parts, answer.note].filter(Boolean).join(" · ");
}

function drawMeters() {
  const answer = chat.turns.at(-1)?.answers.at(-1);
  $("per-pass").textContent = answer?.passes ? perPass(answer).toFixed(2) : "–";
  $("per-second").textContent = answer?.passes ? pace(answer).toFixed(1) : "–";
  if (!model) return;
  const most = model.jaxspec.prompt_tokens;
  const share = Math.min(chat.used / most, 1);
  $("context").ariaValueMax = most;
  $("context").ariaValueNow = Math.min(chat.used, most);
  $("context").querySelector("b").style.width = `${100 * share}%`;
  const text = `${chat.used} of ${most} tokens of context`;
  $("context").ariaValueText = $("context").querySelector("span").textContent = text;
  $("context").classList.toggle("full", share > 0.9);
}

function drawLegend(sources) {
  const kinds = ["", ...sources.map((_, i) => `${i}`), ...(sources.length > 1 ? ["several"] : [])];
  const names = kinds.map((kind) => (kind ? `by ${sources[kind] ?? "several"}` : "target"));
  const items = kinds.map((kind, i) => element("li", {}, ...coloured(names[i], kind)));
  $("legend").replaceChildren(...(sources.length ? items : []));
}

// Keep the newest in view, unless the reader has scrolled up.
function follow() {
  if (follows) $("log").scrollTop = $("log").scrollHeight;
}

function noteScroll() {
  const { scrollHeight, scrollTop, clientHeight } = $("log");
  follows = scrollHeight - scrollTop - clientHeight < 40;
  $("newest").hidden = follows;
}

function showNewest() {
  follows = true;
  follow();
}

// To screen readers an answer is one text, when it is whole, and not a line for each token.
function speak(text) {
  if ($("spoken").textContent !== text) $("spoken").textContent = text;
}

async function copyText(node, text) {
  try {
    await navigator.clipboard.writeText(text);
    node.textContent = "Copied";
  } catch {
    node.textContent = "Not allowed here";
  }
  speak(node.textContent);
  setTimeout(() => (node.textContent = "Copy"), 1500);
}

// Asking

// Return the options; show what is wrong with them and return null otherwise.
function readOptions() {
  const wrong = OPTIONS.filter((input) => !input.validity.valid);
  OPTIONS.forEach((input) => showWrong(input, input.validationMessage, false));
  if (wrong.length) {
    showWrong(wrong[0], wrong[0].validationMessage);
    return null;
  }
  const seed = $("seed").value || crypto.getRandomValues(new Uint32Array(1))[0];
  return { most: +$("most").value, temperature: +$("temperature").value, seed: +seed };
}

// Say what is wrong with an option next to it, in view.
function showWrong(input, message, focus = true) {
  const label = input.closest("label");
  label.querySelector(".wrong")?.remove();
  input.setAttribute("aria-invalid", !!message);
  if (message) label.append(element("span", { class: "wrong" }, message));
  if (!focus) return;
  toggleOptions(true);
  input.focus();
}

function toggleOptions(open) {
  $("options").hidden = !open;
  $("more").ariaExpanded = open;
}

// Return the messages from the first turn that is sent to the last question, in OpenAI's form. An
// answer may be empty, such as one of reasoning only: templates want questions and answers by turns.
function messages() {
  const system = $("system").value.trim();
  const sent = system ? [{ role: "system", content: system }] : [];
  for (const { text, pictures: urls, answers } of chat.turns.slice(chat.first)) {
    const parts = urls.map((url) => ({ type: "image_url", image_url: { url } }));
    sent.push({ role: "user", content: parts.length ? [...parts, { type: "text", text }] : text });
    const content = answers.map((answer) => answer.text).findLast((said) => said) ?? "";
    sent.push({ role: "assistant", content });
  }
  return sent.slice(0, -1);
}

async function askQuestion(race) {
  await reading;
  const text = $("question").value.trim();
  if (running || !(text || pictures.length)) return;
  const turn = { text, pictures, race };
  const number = edited ?? chat.turns.length;
  takeBack();
  if (await ask(turn, number)) return;
  const more = $("question").value; // written meanwhile
  if (number < chat.turns.length) {
    aside = [more, pictures];
    setComposer(text, turn.pictures);
    setEdited(number);
  } else {
    setComposer(more ? `${text}\n${more}`.trim() : text, [...turn.pictures, ...pictures]);
  }
}

function takeBack() {
  setComposer(...aside);
  aside = ["", []];
}

// Answer a turn in the place of turn `number` and all after it. Where nothing was written, put
// those back and return false.
async function ask(turn, number) {
  $("problem").textContent = "";
  const options = readOptions();
  if (running || !options) return false;
  const before = { ...chat };
  Object.assign(turn, options, { answers: [] });
  chat.turns = [...chat.turns.slice(0, number), turn];
  chat.first = Math.min(chat.first, number);
  setEdited(null);
  busy(new AbortController());
  let problem = "";
  try {
    await answer(turn, running.signal);
  } catch (error) {
    problem = error.name === "AbortError" ? "" : error.message;
    const note = problem ? `broken off: ${problem}` : "stopped";
    for (const each of turn.answers) each.note = each.ended ? "" : note;
    watch();
  }
  busy(null);
  const written = turn.answers.some((each) => each.ended || each.runs.length);
  if (!written) {
    chat = before;
    $("problem").textContent = problem;
  }
  draw();
  follow();
  keepChat();
  speak(written ? turn.answers.at(-1).text : problem || "stopped");
  if (document.activeElement === document.body) $("question").focus();
  return written;
}

// Write a turn's answers. Turns that do not fit in a prompt any more are left out, oldest first.
async function answer(turn, signal) {
  const { images = Infinity } = model?.jaxspec ?? {};
  const shown = () => chat.turns.slice(chat.first).flatMap((each) => each.pictures).length;
  while (shown() > images && chat.turns[chat.first] !== turn) chat.first += 1;
  for (;;) {
    turn.answers = turn.race ? [newAnswer(), newAnswer()] : [newAnswer()];
    const { most: max_tokens, temperature, seed } = turn;
    const options = { model: model?.id, messages: messages(), max_tokens, temperature, seed };
    draw();
    showNewest();
    const lanes = turn.answers.map((each, i) => {
      const plain = turn.race && !i ? { draft: false } : {};
      return write(each, { ...options, ...plain }, signal, () => progress(turn));
    });
    try {
      return await Promise.all(lanes);
    } catch (error) {
      await Promise.allSettled(lanes);
      if (error.code !== "context_length_exceeded" || chat.turns[chat.first] === turn) throw error;
      chat.first += 1;
    }
  }
}

function progress(turn) {
  tell(turn);
  follow();
  drawMeters();
  keepChat(1000);
  const waits = turn.answers.every((each) => !each.runs.length);
  speak(waits ? waitText(turn.answers.at(-1)) : "Answering ...");
}

function busy(controller) {
  running = controller;
  $("send").textContent = running ? "Stop" : "Ask";
  $("race").disabled = $("new").disabled = !!running;
  $("log").ariaBusy = !!running;
}

function edit(number) {
  if (running) return;
  if (edited === null) aside = [$("question").value, pictures];
  setComposer(chat.turns[number].text, chat.turns[number].pictures);
  setEdited(number);
  $("question").focus();
}

function setEdited(number) {
  edited = number;
  $("editing").hidden = number === null;
}

function setComposer(text, urls) {
  $("question").value = text;
  pictures = [...urls];
  drawPictures();
  grow();
}

function begin() {
  chat = { turns: [], first: 0, used: 0 };
  $("problem").textContent = "";
  aside = ["", []];
  takeBack();
  setEdited(null);
  draw();
  keepChat();
  $("question").focus();
}

// Let the box be as high as its text; its style has the most.
function grow() {
  $("question").style.height = "auto";
  $("question").style.height = `${$("question").scrollHeight}px`;
}

// The browser keeps the chat of each tab, the tab its options, and all tabs the theme.

const [ofTab, ofAll] = ["sessionStorage", "localStorage"].map((name) => {
  const unless = (work) => {
    try {
      return work(window[name]);
    } catch {
      return null; // the browser may keep nothing, have no storage, or a full one
    }
  };
  return {
    getItem: (key) => unless((storage) => storage.getItem(key)),
    setItem: (key, value) => unless((storage) => storage.setItem(key, value)),
  };
});
const newTab = () => Date.now() + Math.random();
let tab = +(ofTab.getItem("chat") ?? newTab());
let kept = 0; // when the chat was kept last

function chats(mode, work) {
  return new Promise((resolve, reject) => {
    const opening = indexedDB.open("jaxspec");
    opening.onupgradeneeded = () => opening.result.createObjectStore("chats");
    opening.onerror = () => reject(opening.error);
    opening.onsuccess = () => {
      const request = work(opening.result.transaction("chats", mode).objectStore("chats"));
      request.onsuccess = () => resolve(request.result);
      request.onerror = () => reject(request.error);
    };
  });
}

// Keep the chat, if that was not done within the last `ms`.
function keepChat(ms = 0) {
  if (Date.now() - kept < ms) return;
  kept = Date.now();
  const turns = chat.turns.map(({ nodes, ...turn }) => turn);
  const put = (store) => store.put({ ...chat, turns }, tab);
  chats("readwrite", put).catch(() => {}); // some private windows keep nothing
}

// Hold a tab's number while the tab is open. Return whether no other tab holds it.
function hold(number) {
  if (!navigator.locks) return true; // not by https, nor on this machine
  return new Promise((resolve) => {
    const ask = navigator.locks.request(`chat ${number}`, { ifAvailable: true }, (lock) => {
      resolve(!!lock);
      return lock && new Promise(() => {});
    });
    ask.catch(() => resolve(true)); // some private windows have no locks
  });
}

async function restore() {
  for (const input of OPTIONS) input.value = ofTab.getItem(input.id) ?? input.value;
  const before = await chats("readonly", (store) => store.get(tab)).catch(() => null);
  if (!(await hold(tab))) hold((tab = newTab())); // the browser has duplicated a tab
  ofTab.setItem("chat", tab);
  if (before && !chat.turns.length) {
    chat = before;
    for (const each of chat.turns.flatMap((turn) => turn.answers)) {
      if (!each.ended) each.note ||= "broken off: the page was closed";
    }
    draw();
    showNewest();
  }
  const old = IDBKeyRange.upperBound(Date.now() - WEEK);
  await chats("readwrite", (store) => store.delete(old)).catch(() => {});
  if (before) keepChat();
}

// Pictures

let reading = Promise.resolve(); // ends once all given pictures are read

function addFiles(files) {
  reading = reading.then(() => readFiles(files));
  return reading;
}

async function readFiles(files) {
  const most = model?.jaxspec.images ?? 1;
  for (const file of files) {
    if (!file.type.startsWith("image/")) continue;
    if (pictures.length >= most) {
      $("problem").textContent = `this server takes ${counted(most, "picture")} at a time`;
      break;
    }
    try {
      const url = await dataUrl(file);
      pictures.push(url); // those of now
    } catch {
      $("problem").textContent = `${file.name}: not readable as a picture`;
    }
  }
  drawPictures();
}

async function dataUrl(file) {
  const image = await createImageBitmap(file);
  const scale = Math.min(1, Math.sqrt(LARGEST / (image.width * image.height)));
  const known = ["image/png", "image/jpeg", "image/webp", "image/gif"].includes(file.type);
  if (scale === 1 && known) {
    return new Promise((resolve, reject) => {
      const reader = new FileReader();
      reader.onload = () => resolve(reader.result);
      reader.onerror = reject;
      reader.readAsDataURL(file);
    });
  }
  const canvas = element("canvas", {
    width: Math.max(1, Math.floor(image.width * scale)),
    height: Math.max(1, Math.floor(image.height * scale)),
  });
  canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
  return canvas.toDataURL("image/png");
}

function drawPictures() {
  const remove = (i) => {
    pictures.splice(i, 1);
    $("problem").textContent = "";
    drawPictures();
    $("question").focus();
  };
  const items = pictures.map((url, i) => {
    const image = element("img", { src: url, alt: `Picture ${i + 1}` });
    return element("li", {}, image, button("×", () => remove(i), `Remove picture ${i + 1}`));
  });
  $("pictures").replaceChildren(...items);
}

// Events

$("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  if (running) running.abort();
  else askQuestion(false);
});
$("race").onclick = () => askQuestion(true);
$("question").oninput = grow;
$("question").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    askQuestion(false);
  }
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") running?.abort();
});
document.addEventListener("paste", (event) => {
  const files = [...(event.clipboardData?.files ?? [])];
  if (files.length) addFiles(files);
});
for (const name of ["dragover", "dragleave", "drop"]) {
  document.addEventListener(name, (event) => {
    if (!event.dataTransfer.types.includes("Files")) return; // a text goes where it is dropped
    event.preventDefault();
    $("composer").classList.toggle("over", name === "dragover");
    if (name === "drop") addFiles([...event.dataTransfer.files]);
  });
}
$("attach").onclick = () => $("file").click();
$("file").onchange = () => {
  addFiles([...$("file").files]);
  $("file").value = "";
};
$("example").onclick = async () => {
  const image = await (await reach("example.png")).blob();
  await addFiles([new File([image], "example.png", { type: "image/png" })]);
  $("question").value ||= model.jaxspec.example;
  $("question").focus();
};
$("new").onclick = begin;
$("keep").onclick = () => {
  takeBack();
  setEdited(null);
  $("question").focus();
};
$("more").onclick = () => toggleOptions($("options").hidden);
for (const input of OPTIONS) {
  input.onchange = () => {
    showWrong(input, input.validationMessage, false);
    ofTab.setItem(input.id, input.value);
  };
}
$("key").addEventListener("change", watch);
$("log").onscroll = noteScroll;
new ResizeObserver(follow).observe($("log"));
$("newest").onclick = showNewest;
const { dataset } = document.documentElement;
const theme = ofAll.getItem("theme");
if (theme) dataset.theme = theme;
$("theme").onclick = () => {
  const dark = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
  dataset.theme = (dataset.theme ?? dark) === "dark" ? "light" : "dark";
  ofAll.setItem("theme", dataset.theme);
};

restore();
watch();
