// Pages that take files: a problem that becomes a job, and a trace of a training: what it loses, and what to change.
import { read } from "/page/picture/data.js";
import { showDiagnosis } from "/page/picture/diagnosis.js";
import { button, card, element } from "/page/picture/panel.js";
import { bytes } from "/page/picture/words.js";
import { ask, post } from "./api.js";
import { choice, drop, field, notice, number, onlyLast, title, trying } from "./parts.js";
/** @import { Shown } from "/page/picture/picture.js" */

const LARGEST = 2 ** 26; // bytes, as the service has it

/** @param {HTMLElement} place @param {AbortSignal} signal */
export function showDiagnose(place, signal) {
  const stacks = { "": "as the trace says", torch: "torch, torchtitan", megatron: "Megatron-LM", primus: "Primus", optpipe: "OptPipe" };
  const asked = {
    layers: element("input", { placeholder: "8, or 8,8,8,6" }),
    stack: choice(Object.entries(stacks), ""),
    memory: number({ value: "", min: 1, max: 1e6, step: "any" }),
    weight_share: number({ value: "", min: 0, max: 1, step: "any" }),
    microbatches: number({ value: "", min: 1, max: 65536 }),
    time_limit_s: number({ value: 10, min: 0, max: 60 }),
  };
  const told = element("div", { role: "status" });
  const shown = element("div", "diagnosis");
  const asking = onlyLast(signal);
  /** @type {Shown | null} */
  let picture = null;
  /** @type {File[]} */
  let files = [];
  const again = button("Diagnose again", () => diagnose(files));
  again.hidden = true;
  const diagnose = (/** @type {File[]} */ chosen) =>
    trying(told, async () => {
      files = chosen;
      const own = asking.next();
      const name = files.length === 1 ? files[0].name : `${files.length} files`;
      const size = files.reduce((sum, file) => sum + file.size, 0);
      if (size > LARGEST)
        throw new Error(`${name} with ${bytes(size)}: expected up to ${bytes(LARGEST)} here; optpipe diagnose FILE reads larger traces.`);
      again.hidden = false;
      told.replaceChildren(notice("plain", `Reading ${name}, and trying what may cure it.`));
      const query = new URLSearchParams({ to: "figure", name });
      for (const [key, { value }] of Object.entries(asked))
        for (const each of key === "layers" ? value.split(/[\s,]+/) : [value]) if (each) query.append(key, each);
      try {
        const content = files.length === 1 ? files[0] : await archive(files);
        const headers = { "Content-Type": "application/octet-stream" };
        const reply = await ask("POST", `/v1/diagnose?${query}`, { text: content, headers, signal: own });
        const found = read(await reply.text());
        picture?.close();
        picture = await showDiagnosis(shown, found);
        told.replaceChildren();
      } catch (error) {
        if (!own.aborted) throw error;
      }
    });
  signal.addEventListener("abort", () => picture?.close());
  const about = element("p", "quiet", "A timeline of StragglerAnalysis, the traces of torch.profiler or record_trace of all ranks, the files of Primus' dump, a log of Megatron's timers, or a CSV; packed by gzip or not.");
  const fields = [
    field("Layers of a stage", asked.layers, "--layers"),
    field("Activations a device may hold", asked.memory, "--memory"),
    field("Share of W in a backward", asked.weight_share, "--weight-share"),
    field("Micro-batches a step, of a Megatron log", asked.microbatches),
    field("Lines for", asked.stack),
    field("Search in s", asked.time_limit_s),
  ];
  const trace = card("Trace", drop("Choose files, or drop them here", { multiple: "" }, diagnose), about);
  const more = card("What the trace does not say", element("div", "controls", ...fields), again);
  place.replaceChildren(title("Diagnose a trace"), element("div", "cards", trace, more), told, shown);
}

/** A tar archive (POSIX ustar) of files.
 * @param {File[]} files */
async function archive(files) {
  const parts = files.flatMap((file) => {
    const head = new Uint8Array(512);
    const put = (/** @type {number} */ at, /** @type {string} */ text) => head.set(new TextEncoder().encode(text), at);
    put(0, file.name.replace(/[^\x20-\x7e]/g, "_").slice(-100));
    put(100, "0000644");
    put(124, file.size.toString(8).padStart(11, "0"));
    put(136, "0".repeat(11));
    put(148, "        0"); // the sum is taken with spaces in its place; 0: a file
    put(257, "ustar\x0000");
    put(148, `${head.reduce((sum, byte) => sum + byte, 0).toString(8).padStart(6, "0")}\x00`);
    return [head, file, new Uint8Array(-file.size & 511)];
  });
  return new Blob([...parts, new Uint8Array(1024)]);
}

/** @param {HTMLElement} place @param {AbortSignal} signal */
export function showSubmit(place, signal) {
  const limit = number({ value: 60, min: 1, max: 3600 });
  const lengths = { makespan: "the whole iteration", span: "the busiest device" };
  const objective = choice(Object.entries(lengths), "makespan");
  const changeable = { layers: "the stages, where layers are known", keep: "nothing", all: "the stages" };
  const stages = choice(Object.entries(changeable), "layers");
  const told = element("div", "");
  const submit = async () => {
    const free = problem.layers?.length ? "all" : "keep";
    const placements = stages.value === "layers" ? free : stages.value;
    const options = { time_limit_s: Number(limit.value), objective: objective.value, placements };
    const job = await post("/v1/jobs", { problem, ...options }, signal);
    location.hash = `#/jobs/${job.id}`;
  };

  /** @type {any} */
  let problem = null;
  const about = element("p", "quiet", "A problem as optpipe profile, optpipe model or optpipe problem from write it.");
  const go = button("Submit the file", () => trying(told, submit), "primary");
  go.disabled = true;
  const take = (/** @type {File[]} */ [file]) =>
    trying(told, async () => {
      go.disabled = true;
      if (!file) return;
      problem = problemIn(await file.text(), file.name);
      about.textContent = `${problem.name || file.name}: ${problem.devices?.length} devices, ${problem.stages?.length} stages, ${problem.microbatches} micro-batches`;
      go.disabled = false;
    });
  const file = drop("Choose a file, or drop it here", { accept: ".json,application/json" }, take);
  const fields = [field("Time limit in s", limit), field("What is to be short", objective), field("May be changed", stages)];
  const how = card("How it is searched", element("div", "controls", ...fields));
  const from = card("Problem", file, about, element("div", "actions", go));
  place.replaceChildren(title("Submit a problem"), told, element("div", "cards", from, how));
  place.dataset.drawn = "true";
}

/** The problem in a file: itself, or that of a schedule or a submission.
 * @param {string} text @param {string} name */
function problemIn(text, name) {
  let problem;
  try {
    problem = JSON.parse(text);
  } catch {
    throw new Error(`${name} is not JSON; expected a problem file.`);
  }
  problem = problem?.problem ?? problem;
  if (typeof problem !== "object" || problem === null || !("stages" in problem))
    throw new Error(`${name} has no stages; expected a problem file.`);
  return problem;
}
