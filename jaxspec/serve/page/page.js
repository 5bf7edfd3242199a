// The page of `jaxspec serve`: ask with pictures, and see which tokens were drafted.

const $ = (id) => document.getElementById(id);
const LARGEST = 2 ** 22; // pixels of a picture; larger ones are scaled down before they are sent

let model = null; // what /v1/models tells
let messages = []; // the conversation so far, in OpenAI's form
let pictures = []; // data URLs of the next question
let running = null; // aborts the answers that are being written

function element(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

// The server

function headers() {
  const key = $("key").value.trim();
  return key ? { Authorization: `Bearer ${key}` } : {};
}

async function failure(response) {
  const body = await response.json().catch(() => null);
  return new Error(body?.error?.message ?? `status ${response.status}`);
}

async function connect() {
  try {
    const response = await fetch("v1/models", { headers: headers() });
    if (response.status === 401) {
      $("about").textContent = "this server wants a key: see Options";
      document.querySelector("details").open = true;
      return;
    }
    if (!response.ok) throw await failure(response);
    model = (await response.json()).data[0];
    const health = await (await fetch("health")).json();
    const { sources, images, new_tokens: most, race, example } = model.jaxspec;
    $("about").textContent =
      health.status === "ready"
        ? `${model.id}, ${sources.length ? `drafted by ${sources.join(" and ")}` : "no draft"}`
        : `${model.id}: ${health.status}, ${health.programs} of ${health.of} programs`;
    $("race").hidden = !race;
    $("attach").hidden = images === 0;
    $("example").hidden = !example;
    $("most").max = most;
    if ($("most").value > most) $("most").value = most;
    const names = ["target", ...sources, ...(sources.length > 1 ? ["several agree"] : [])];
    const kinds = ["", ...sources.map((_, i) => `drafted from-${i}`), "drafted from-several"];
    $("legend").replaceChildren(
      ...names.map((name, i) => element("li", {}, element("span", { class: kinds[i] }, name))),
    );
    if (health.status !== "ready") setTimeout(connect, 1000);
  } catch (error) {
    $("about").textContent = `no server: ${error.message}`;
    setTimeout(connect, 3000);
  }
}

// Yield the chunks of a streamed answer.
async function* chunks(options, signal) {
  const response = await fetch("v1/chat/completions", {
    method: "POST",
    headers: { "Content-Type": "application/json", ...headers() },
    body: JSON.stringify({ model: model?.id, messages, stream: true, trace: true, ...options }),
    signal,
  });
  if (!response.ok) throw await failure(response);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let text = ""; ; ) {
    const { value, done } = await reader.read();
    if (done) return;
    const events = (text + value).split("\n\n");
    text = events.pop();
    for (const event of events) {
      const data = event.replace(/^data: /, "");
      if (data === "[DONE]") return;
      const body = JSON.parse(data);
      if (body.error) throw new Error(body.error.message);
      yield body.choices[0];
    }
  }
}

// An answer

function tokenClass(trace, i) {
  if (!(trace.place?.[i] >= 0)) return "";
  const agree = (trace.agree?.[i] ?? []).flatMap((yes, source) => (yes ? [source] : []));
  if (agree.length > 1) return "drafted from-several";
  return `drafted from-${agree[0] ?? 0}`;
}

function sourceName(kind) {
  if (!kind) return "written by the target";
  const source = kind.match(/from-(\d)/)?.[1];
  return `drafted by ${source ? model.jaxspec.sources[source] : "several"}`;
}

// Write the parts of an answer into `place` as they come; return all of it.
async function write(place, options, signal, tick) {
  const whole = { text: "", tokens: [], passes: 0, emitted: 0, decode_ms: 0, prefill_ms: 0 };
  for await (const choice of chunks(options, signal)) {
    const text = choice.delta.content ?? "";
    whole.text += text;
    const trace = choice.jaxspec;
    if (!trace) continue;
    const { tokens, pieces, passes, emitted, decode_ms, prefill_ms } = trace;
    whole.tokens.push(...tokens);
    Object.assign(whole, { passes, emitted, decode_ms, prefill_ms });
    if (pieces) {
      pieces.forEach((piece, i) => {
        const kind = tokenClass(trace, i);
        const look = trace.reasoning[i] ? `thought ${kind}` : kind;
        const [, space, word] = piece.match(/^(\s*)(.*)$/s); // no line under a space
        place.append(space, element("span", { class: look, title: sourceName(kind) }, word));
      });
    } else {
      const thought = choice.delta.reasoning_content;
      if (thought) place.append(element("span", { class: "thought" }, thought));
      place.append(text);
    }
    tick(whole);
    $("log").scrollTop = $("log").scrollHeight;
  }
  return whole;
}

const pace = ({ emitted, decode_ms }) => (decode_ms ? (1000 * emitted) / decode_ms : 0);
const perPass = ({ emitted, passes }) => (passes ? emitted / passes : 0);

function meters(whole) {
  $("per-pass").textContent = whole.passes ? perPass(whole).toFixed(2) : "–";
  $("per-second").textContent = whole.passes ? pace(whole).toFixed(1) : "–";
}

function options() {
  return { max_tokens: +$("most").value || 128, temperature: +$("temperature").value || 0, seed: 0 };
}

// The conversation

function say(role, ...children) {
  $("welcome").hidden = true;
  const node = element("article", { class: `said ${role}` }, element("h2", {}, role), ...children);
  $("log").append(node);
  node.scrollIntoView({ block: "end" });
  return node;
}

function takeQuestion() {
  const text = $("question").value.trim();
  if (!text && !pictures.length) return false;
  const shown = pictures.map((url) => ({ type: "image_url", image_url: { url } }));
  const content = shown.length ? [...shown, { type: "text", text }] : text;
  messages.push({ role: "user", content });
  const images = pictures.map((url, i) => element("img", { src: url, alt: `Picture ${i + 1}` }));
  say("user", element("div", { class: "shown" }, ...images), element("p", { class: "text" }, text));
  $("question").value = "";
  pictures = [];
  drawPictures();
  return true;
}

// Ask the question in the form with `work`, and take it back where that fails.
async function ask(work) {
  $("problem").textContent = "";
  const question = $("question").value;
  const before = { messages: [...messages], pictures, last: $("log").lastElementChild };
  if (running || !takeQuestion()) return;
  running = new AbortController();
  busy(true);
  try {
    const text = await work(running.signal);
    messages.push({ role: "assistant", content: text });
  } catch (error) {
    if (error.name !== "AbortError") $("problem").textContent = error.message;
    ({ messages, pictures } = before);
    $("question").value ||= question;
    while ($("log").lastElementChild !== before.last) $("log").lastElementChild.remove();
    drawPictures();
  } finally {
    running = null;
    busy(false);
    $("question").focus();
  }
}

function busy(yes) {
  $("send").textContent = yes ? "Stop" : "Ask";
  $("race").disabled = $("new").disabled = yes;
}

async function answer(signal) {
  const place = element("p", { class: "answer" });
  const note = element("p", { class: "note" });
  say("assistant", place, note);
  const whole = await write(place, options(), signal, meters);
  note.textContent =
    `${whole.tokens.length} tokens in ${whole.passes} passes after the prompt's, ` +
    `${((whole.prefill_ms + whole.decode_ms) / 1000).toFixed(2)} s`;
  return whole.text;
}

// Ask twice at once, without drafts and with them. The server lets both take turns, block by block,
// and each clock counts its own turns only, without the prefill, which is the same for both.
async function race(signal) {
  const lane = (name) => {
    const clock = element("span", { class: "clock" }, "0.00 s");
    const place = element("p", { class: "answer" });
    const note = element("p", { class: "note" });
    const node = element("div", { class: "lane" }, element("h3", {}, name, clock), place, note);
    const tick = (whole) => {
      clock.textContent = `${(whole.decode_ms / 1000).toFixed(2)} s`;
      note.textContent =
        `${whole.passes} passes, ${perPass(whole).toFixed(2)} tokens per pass, ` +
        `${pace(whole).toFixed(1)} tokens a second; before, the prompt was read in ` +
        `${(whole.prefill_ms / 1000).toFixed(2)} s`;
      if (name === "drafted") meters(whole);
    };
    return { node, place, tick };
  };
  const plain = lane("plain");
  const drafted = lane("drafted");
  const verdict = element("p", { class: "verdict", role: "status" });
  const lanes = element("div", { class: "lanes" }, plain.node, drafted.node);
  say("race", lanes, verdict);
  const both = [
    write(plain.place, { ...options(), draft: false }, signal, plain.tick),
    write(drafted.place, options(), signal, drafted.tick),
  ];
  const [slow, fast] = await Promise.all(both);
  const same = slow.tokens.join() === fast.tokens.join();
  const factor = (slow.decode_ms / fast.decode_ms).toFixed(2);
  verdict.textContent = `${same ? "identical" : "different"}, ${factor} times as fast`;
  verdict.classList.toggle("differs", !same);
  return fast.text;
}

// Pictures

async function addFiles(files) {
  const most = model?.jaxspec.images ?? 1;
  for (const file of files) {
    if (!file.type.startsWith("image/")) continue;
    if (pictures.length >= most) {
      $("problem").textContent = `this server takes ${most} pictures a request`;
      break;
    }
    try {
      pictures.push(await dataUrl(file));
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
  $("pictures").replaceChildren(
    ...pictures.map((url, i) => {
      const remove = element("button", { type: "button", "aria-label": `Remove picture ${i + 1}` });
      remove.textContent = "×";
      remove.onclick = () => {
        pictures.splice(i, 1);
        drawPictures();
        $("question").focus();
      };
      return element("li", {}, element("img", { src: url, alt: `Picture ${i + 1}` }), remove);
    }),
  );
}

// Events

$("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  if (running) running.abort();
  else ask(answer);
});
$("race").onclick = () => ask(race);
$("question").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    if (!running) ask(answer);
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
  const image = await (await fetch("example.png")).blob();
  await addFiles([new File([image], "example.png", { type: "image/png" })]);
  $("question").value ||= model.jaxspec.example;
  $("question").focus();
};
$("new").onclick = () => {
  messages = [];
  for (const node of [...$("log").querySelectorAll(".said")]) node.remove();
  $("welcome").hidden = false;
  meters({ passes: 0 });
  $("question").focus();
};
$("key").onchange = () => {
  sessionStorage.setItem("key", $("key").value);
  connect();
};
$("theme").onclick = () => {
  const dark = getComputedStyle(document.documentElement).colorScheme === "dark"
    || (!document.documentElement.dataset.theme && matchMedia("(prefers-color-scheme: dark)").matches);
  document.documentElement.dataset.theme = dark ? "light" : "dark";
  localStorage.setItem("theme", document.documentElement.dataset.theme);
};

const theme = localStorage.getItem("theme");
if (theme) document.documentElement.dataset.theme = theme;
$("key").value = sessionStorage.getItem("key") ?? "";
connect();
