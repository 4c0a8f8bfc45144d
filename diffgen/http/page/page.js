// The page: a client of /v1/capabilities, /v1/images/generations and /v1/videos like any other.

const byId = (id) => document.getElementById(id);
const form = byId("form"), results = byId("results"), key = byId("key");
const NAMES = {
  width: "Width", height: "Height", num_inference_steps: "Steps", guidance_scale: "Guidance", seed: "Seed",
  num_outputs_per_prompt: "Images", num_frames: "Frames", fps: "Frames a second",
};
const ONLY_IMAGES = new Set(["num_outputs_per_prompt", "output_format"]);
const ONLY_CLIPS = new Set(["num_frames", "fps", "seconds"]);
const POLL_MS = 700;
let model = null;
let told = "";  // the text of the model's capabilities
let connecting = false;
let listed = false;  // the clips that the server keeps

key.value = sessionStorage.getItem("key") ?? "";
byId("access").addEventListener("submit", (event) => { event.preventDefault(); key.blur(); });
key.addEventListener("change", () => { sessionStorage.setItem("key", key.value); connect(); });

function headers(more = {}) {
  if (/[^\x20-\xff]/.test(key.value)) throw new Refused(401, "no header can hold this key");
  return key.value ? { ...more, Authorization: `Bearer ${key.value}` } : more;
}

class Refused extends Error {
  constructor(status, text) { super(text); this.status = status; }
}

async function call(path, { json, ...options } = {}) {
  const body = json && { method: "POST", body: JSON.stringify(json) };
  const kind = json ? { "Content-Type": "application/json" } : {};
  const answer = await fetch(path, { ...body, ...options, headers: headers(kind) }).catch((error) => {
    if (error instanceof TypeError) connect();  // tells of it, until the server is there again
    throw error;
  });
  if (answer.ok) return answer;
  const found = await answer.json().catch(() => null);
  throw new Refused(answer.status, found?.error?.message ?? `the server answered ${answer.status}`);
}

// Seeds may be beyond what JavaScript's numbers hold: they are sent as they were typed, and shown as they were told.
function number(text) {
  const value = Number(text);
  return Number.isSafeInteger(value) || !/^[1-9]\d*$/.test(text) ? value : JSON.rawJSON?.(text) ?? value;
}

const parse = (text) => JSON.parse(text, (name, value, context) =>
  Number.isInteger(value) && !Number.isSafeInteger(value) ? context?.source ?? value : value);
const ask = async (path, options) => parse(await (await call(path, options)).text());
const about = (seconds) => seconds > 90 ? `${Math.round(seconds / 60)} min` : `${Math.ceil(seconds)} s`;
const pause = (ms) => new Promise((done) => setTimeout(done, ms));
const task = () => form.elements.task.value;

// --- the form --------------------------------------------------------------------------------------------------------

function field(name, rule) {
  const label = document.createElement("label");
  const words = name.replaceAll("_", " ");
  label.textContent = NAMES[name] ?? words[0].toUpperCase() + words.slice(1);
  label.title = rule.description ?? "";
  label.dataset.name = name;
  const input = document.createElement(rule.enum ? "select" : "input");
  input.name = name;
  if (rule.enum) {
    for (const value of ["", ...rule.enum.filter(Boolean)]) input.add(new Option(value || "default", value));
  } else if ([rule.type].flat().includes("string") && !/number|integer/.test(rule.type)) {
    input.type = "text";
  } else {
    const whole = [rule.type].flat().includes("integer");
    input.type = "number";
    input.inputMode = whole ? "numeric" : "decimal";
    input.step = whole ? 1 : "any";
    if (rule.minimum !== undefined) input.min = rule.minimum;
    if (rule.maximum !== undefined) input.max = rule.maximum;
  }
  if (name === "width" || name === "height") input.step = input.min = model.size_multiple;
  if (name === "num_frames" && model.frame_stride) {
    [input.min, input.step] = [1 + model.frame_stride, model.frame_stride];
    input.max = model.limits.frames;
  }
  if (name === "num_inference_steps") input.max = model.limits.steps;
  if (name === "num_outputs_per_prompt") input.max = Math.min(model.limits.n, model.limits.images);
  input.placeholder = rule.default ?? (name === "seed" ? "random" : name === "num_outputs_per_prompt" ? "1" : "");
  if (name === "num_frames") {
    const stride = model.frame_stride || 1, fps = model.defaults.fps ?? 8;
    const frames = Math.round((model.default_clip_seconds * fps - 1) / stride) * stride + 1;
    input.placeholder = rule.default > 1 ? rule.default : frames;
  }
  label.append(input);
  return label;
}

function showForTask() {
  for (const label of form.querySelectorAll("[data-name]")) {
    const { name } = label.dataset;
    label.hidden = task() === "image" ? ONLY_CLIPS.has(name) : ONLY_IMAGES.has(name);
    label.querySelector("input, select").disabled = label.hidden;
  }
}

function build() {
  const main = [], more = [];
  for (const [name, rule] of Object.entries(model.parameters)) {
    if (name === "negative_prompt") continue;
    (name in NAMES ? main : more).push(field(name, rule));
  }
  const [usual, ...others] = model.output_formats.image;
  more.push(field("output_format", { description: `file format; ${usual} when left`, enum: [usual, ...others] }));
  byId("fields").replaceChildren(...main);
  byId("more-fields").replaceChildren(...more);
  byId("more").hidden = more.length === 0;
  byId("tasks").hidden = !model.tasks.includes("video");
  byId("generate").disabled = false;
  showForTask();
}

function values() {
  const found = { prompt: form.elements.prompt.value };
  for (const input of form.querySelectorAll("[name]")) {
    if (input.disabled || input.value === "" || ["prompt", "task"].includes(input.name)) continue;
    found[input.name] = input.type === "number" ? number(input.value) : input.value;
  }
  return found;
}

function useAgain(kind, params) {
  form.elements.task.value = kind;
  showForTask();
  for (const input of form.querySelectorAll("[name]")) {
    const given = params[input.name];
    if (input.name !== "task") input.value = given?.rawJSON ?? given ?? "";
  }
  form.elements.prompt.focus();
  form.scrollIntoView({ block: "nearest" });
}

// --- results ---------------------------------------------------------------------------------------------------------

class Card {
  constructor(kind, params) {
    this.kind = kind;
    this.params = params;
    this.root = byId("card").content.firstElementChild.cloneNode(true);
    this.urls = [];
    this.part(".text").textContent = params.prompt;
    this.part(".again").addEventListener("click", () => useAgain(this.kind, this.params));
    this.part(".remove").addEventListener("click", () => this.remove());
    this.part(".cancel").addEventListener("click", () => this.cancel());
    this.onCancel = async () => {};
    this.onRemove = async () => {};
    this.tell("waiting", null);
    results.prepend(this.root);
  }

  reveal() {
    this.root.scrollIntoView({ block: "nearest" });  // on a phone it is below the form
    return this;
  }

  part(selector) { return this.root.querySelector(selector); }

  tell(text, percent) {
    this.part(".told").textContent = text;
    if (percent === null) this.part("progress").removeAttribute("value");
    else this.part("progress").value = percent;
  }

  async cancel() {
    this.part(".cancel").disabled = this.cancelled = true;
    try {
      await this.onCancel();
    } catch (error) {
      this.part(".cancel").disabled = this.cancelled = false;  // the work goes on
      this.tell(plainly(error), null);
    }
  }

  async remove() {
    try {
      if (this.part(".work").hidden) {
        await this.onRemove();
      } else {
        await this.cancel();
        if (!this.cancelled) return;
      }
    } catch (error) {
      return this.fail(plainly(error));
    }
    this.urls.forEach(URL.revokeObjectURL);
    // Who works with the keyboard goes on at the next result.
    const next = this.root.nextElementSibling?.querySelector(".remove") ?? form.elements.prompt;
    if (this.root.contains(document.activeElement)) next.focus();
    this.root.remove();
  }

  show(...media) {
    this.part(".media").replaceChildren(...media);
  }

  fail(text) {
    this.part(".work").hidden = true;
    this.part(".error").hidden = false;
    this.part(".error").textContent = text;
    this.root.classList.toggle("cancelled", Boolean(this.cancelled));
    this.part(".media .preview")?.remove();
  }

  done(params, warnings, seconds) {
    this.params = params;
    this.part(".work").hidden = true;
    byId("said").textContent = `Done: ${params.prompt}`;  // for screen readers
    const shown = {
      size: `${params.width}×${params.height}`, steps: params.num_inference_steps, guidance: params.guidance_scale,
      seed: params.seed, ...(params.num_frames > 1 && { frames: params.num_frames, fps: params.fps }),
      negative: params.negative_prompt, time: seconds && `${seconds.toFixed(1)} s`,
    };
    this.part(".params").replaceChildren(...Object.entries(shown).filter(([, value]) => value ?? false).map(([name, value]) => {
      const pair = document.createElement("div");
      pair.append(Object.assign(document.createElement("dt"), { textContent: name }));
      pair.append(Object.assign(document.createElement("dd"), { textContent: value }));
      return pair;
    }));
    this.part(".warnings").replaceChildren(
      ...warnings.map((text) => Object.assign(document.createElement("li"), { textContent: text })),
    );
  }
}

function picture(src, alt, className = "") {
  return Object.assign(document.createElement("img"), { src, alt, className });
}

const inline = (event) => `data:image/${event.output_format};base64,${event.b64_json}`;

// --- images: one stream a request ------------------------------------------------------------------------------------

async function* events(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    text += value;
    for (let end; (end = text.indexOf("\n\n")) >= 0; text = text.slice(end + 2)) {
      const lines = text.slice(0, end).split("\n");
      const data = lines.find((line) => line.startsWith("data: "));
      if (data) yield parse(data.slice(6));
      else if (lines[0].startsWith(": ")) yield { type: "comment", text: lines[0].slice(2) };
    }
  }
}

const SPANS = { denoise: [0, 88], decode: [88, 99] };

async function makeImages(params) {
  const card = new Card("image", params).reveal(), control = new AbortController(), made = [];
  // The server cancels what nobody waits for.
  card.onCancel = async () => control.abort();
  try {
    const json = { ...params, stream: true, partial_images: 3 };
    const answer = await call("v1/images/generations", { json, signal: control.signal });
    for await (const event of events(answer)) {
      if (event.type === "comment") {
        const [, stage, step, total] = event.text.match(/^(\w+) (\d+)\/(\d+)$/) ?? [];
        const [low, high] = SPANS[stage] ?? [0, 0];
        if (stage) card.tell(`${stage} ${step} of ${total}`, low + (high - low) * step / total);
      } else if (event.type === "image_generation.partial_image") {
        card.show(picture(inline(event), "preview", "preview"));
      } else if (event.type === "image_generation.completed") {
        made.push(picture(inline(event), params.prompt));
        card.show(...made);
        card.done({ ...event.params, output_format: params.output_format }, event.warnings, event.inference_time_s);
      } else if (event.type === "error") {
        throw new Error(event.error.message);
      }
    }
    if (!made.length) throw new Error("the server closed the connection before the image was done");
  } catch (error) {
    card.fail(card.cancelled ? "Cancelled." : plainly(error));
  }
}

function plainly(error) {
  if (error instanceof TypeError) return "The server cannot be reached.";
  if (error.status === 401) return key.value ? "The API key is wrong." : "This server needs an API key.";
  return error.message;
}

// --- clips: jobs of the server's, which outlive this page ------------------------------------------------------------

async function makeClip(params) {
  const card = new Card("video", params).reveal();
  try {
    await follow(card, await ask("v1/videos", { json: { ...params, partial_images: 3 } }));
  } catch (error) {
    card.fail(card.cancelled ? "Cancelled." : plainly(error));
  }
}

async function discard(path) {
  await call(path, { method: "DELETE" }).catch((error) => {
    if (error.status !== 404) throw error;  // else it has gone already
  });
}

async function showPreview(card, path) {
  // It may have ended meanwhile.
  const content = await call(`${path}/content?variant=preview`).then((answer) => answer.blob()).catch(() => null);
  if (!content) return;
  card.urls.push(URL.createObjectURL(content));
  card.show(picture(card.urls.at(-1), "preview", "preview"));
}

async function follow(card, job) {
  const path = `v1/videos/${job.id}`;
  card.onCancel = card.onRemove = () => discard(path);
  if (card.cancelled) await card.cancel();  // while there was no job yet
  let seen = 0;
  while (job.status === "queued" || job.status === "in_progress") {
    const left = job.eta === null ? "" : `, about ${about(job.eta)} left`;
    const waits = job.ahead ? `waiting behind ${job.ahead}` : "waiting";
    if (job.status === "queued") card.tell(waits + left, null);
    else card.tell(`${job.progress} %${left}`, job.progress);
    if (job.previews > seen) {
      seen = job.previews;
      await showPreview(card, path);
    }
    for (let known = false; !known;) {
      await pause(POLL_MS);
      try {
        job = await ask(path);
        known = true;
      } catch (error) {
        if (error instanceof Refused && error.status < 500) throw error;
        card.tell("waiting for the server", null);  // it may be starting again, and the job with it
      }
    }
  }
  if (job.status === "failed") return card.fail(job.error.message);
  const content = await (await call(`${path}/content`)).blob();
  const video = document.createElement("video");
  card.urls.push(URL.createObjectURL(content));
  Object.assign(video, { src: card.urls.at(-1), controls: true, loop: true, muted: true, autoplay: true, playsInline: true });
  video.setAttribute("aria-label", job.prompt);
  card.show(video);
  card.done(job.params, job.warnings, job.inference_time_s);
}

async function showJobs() {
  const { data } = await ask("v1/videos?limit=20");
  for (const job of data.reverse()) {  // the newest goes on top
    if (job.error) continue;
    const card = new Card("video", job.params);
    follow(card, job).catch((error) => {
      if (error.status === 404 && !card.cancelled) card.root.remove();  // it was kept its time
      else card.fail(card.cancelled ? "Cancelled." : plainly(error));
    });
  }
}

// --- start -----------------------------------------------------------------------------------------------------------

async function connect() {
  if (connecting) return;
  connecting = true;
  const state = byId("state");
  for (;;) {
    try {
      const now = await (await call("v1/capabilities")).text();
      model = JSON.parse(now);
      state.textContent = `${model.model} is ready`;
      state.classList.remove("wrong");
      if (now !== told) build();  // else what was typed stays
      told = now;
      if (!listed) await showJobs();
      listed = true;
      break;
    } catch (error) {
      state.textContent = plainly(error);
      state.classList.toggle("wrong", error.status === 401 || error instanceof TypeError);
      if (error.status === 401) {
        key.focus();
        break;
      }
      await pause(1500);
    }
  }
  connecting = false;
}

form.addEventListener("submit", (event) => {
  event.preventDefault();
  if (model) (task() === "image" ? makeImages : makeClip)(values());
});
form.addEventListener("change", showForTask);
form.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) form.requestSubmit();
});
connect();
