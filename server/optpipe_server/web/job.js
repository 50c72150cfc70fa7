// One job, as it goes on: its best schedule and memory, convergence, incumbents side by side, what the training has
// adopted, and its log.
import { joined } from "/page/picture/data.js";
import { button, card, download, element, fullest, region, table, tile } from "/page/picture/panel.js";
import { show } from "/page/picture/picture.js";
import { onThemeChange, theme } from "/page/picture/layout.js";
import { ms, percent } from "/page/picture/words.js";
import { Refused, ask, follow, get, getFigure } from "./api.js";
import { age, apart, badge, choice, dialog, duration, field, fill, link, nameOf, notice, number, refill, trying } from "./parts.js";
/** @import { Bound, Incumbent, Job } from "./api.js" */
/** @import { Shown } from "/page/picture/picture.js" */

const OPEN = ["queued", "running"];
const LINES = 1000; // of a log in one reply
const BEST = "best";
const OTHER = "job:"; // before the number of another job, which stands beside this one
const STACKS = [
  ["Rows, for PyTorch's pipelining", "torch-csv&without_offload=true", ".csv"],
  ["Rows with messages, up to torch 2.13", "torch-comms&without_offload=true", "-comms.csv"],
  ["Rows with messages, from torch 2.15", "torch-comms-waits&without_offload=true", "-waits.csv"],
  ["Arguments, for Megatron-LM", "megatron", "-megatron.txt"],
  ["Table, for Primus", "primus", "-primus.json"],
];

/** @param {HTMLElement} place @param {string} id @param {string} other the job that stands beside it, or nothing
 * @param {AbortSignal} signal */
export async function showJob(place, id, other, signal) {
  const url = `/v1/jobs/${id}`;
  const head = element("div", "title");
  const said = element("div", "");
  const figures = element("div", "tiles");
  const curve = element("div", "curve");
  const found = region("scrolls", "Incumbents");
  const drawing = element("div", "drawing-place");
  const adopted = element("div", "");
  const lines = element("ol", "");
  const log = element("div", { class: "log", tabindex: 0, role: "log", "aria-label": "Log" }, lines);
  const failed = element("div", "");
  /** @type {{job: Job | null, incumbents: Incumbent[], bounds: Bound[], drawn: string, lastLine: number,
   *   shown: Shown | null, others: Job[]}} */
  const state = { job: null, incumbents: [], bounds: [], drawn: "nothing", lastLine: 0, shown: null, others: [] };

  const which = choice([[BEST, "the best"]], BEST, () => draw());
  const beside = choice([["", "nothing"]], "", () => draw());
  const controls = element("div", "controls", field("Incumbent", which), field("beside", beside));
  const schedule = card("Schedule", controls, failed, drawing);
  schedule.classList.add("wide");
  const searched = element("div", "cards", card("Convergence", curve), card("Incumbents", found));
  const adoptions = card("In training", adopted);
  place.replaceChildren(head, said, figures, searched, schedule, element("div", "cards", adoptions, card("Log", log)));
  signal.addEventListener("abort", () => state.shown?.close());

  const chosenSeq = (/** @type {Job} */ { best }) => (which.value === BEST ? (best?.seq ?? null) : Number(which.value));
  /** Draws what is chosen, unless it is drawn. */
  async function draw() {
    const { job, incumbents } = state;
    if (!job) return;
    const seq = chosenSeq(job);
    const another = state.others.find(({ id }) => beside.value === OTHER + id);
    const before = beside.value && !another && Number(beside.value) !== seq ? beside.value : "";
    const address = seq === null ? "" : `${url}/figure?seq=${seq}${before && `&before=${before}`}`;
    const asked = address + (another?.url ?? "");
    if (asked === state.drawn) return;
    state.drawn = asked;
    const none = OPEN.includes(job.state) ? "No schedule has been found yet." : "No schedule was found.";
    if (!address) return drawing.replaceChildren(element("p", "quiet", none));
    await trying(failed, async () => {
      let document = await getFigure(address, signal);
      if (another) {
        const beside = await getFigure(`${another.url}/figure`, signal);
        for (const each of beside.schedules) each.method = `${nameOf(another)}: ${each.method}`;
        for (const each of document.schedules) each.method = `${nameOf(job)}: ${each.method}`;
        document = joined(beside, document);
      }
      if (state.drawn !== asked || signal.aborted) return;
      if (state.shown) await state.shown.update(document);
      else state.shown = await show(drawing, document);
      const last = document.schedules[document.schedules.length - 1];
      place.dataset.bubble = percent(last.bubble);
      place.dataset.memory = percent(fullest(last));
      if (state.job) fillFigures(state.job, incumbents);
      place.dataset.seq = String(seq);
      place.dataset.before = before || (another?.id ?? "");
    });
  }

  /** @param {Job} job @param {Incumbent[]} incumbents */
  function fillFigures(job, incumbents) {
    const own = incumbents.filter(({ problem_version }) => problem_version === job.problem_version);
    const first = own.length ? own[0].value_ms : null;
    const best = job.best;
    const less = best && first ? 1 - best.value_ms / first : 0;
    const limit = `of ${duration(job.options.time_limit_s)}`;
    const searched = tile("Searched", job.spent_s === null ? "–" : duration(job.spent_s), limit);
    figures.replaceChildren(
      tile("Best", best ? ms(best.value_ms) : "–", less > 5e-4 ? `${percent(less)} less than the first` : (best?.method ?? "none yet")),
      tile("Bound", job.lower_bound_ms === null ? "–" : ms(job.lower_bound_ms), "no schedule is shorter"),
      tile("Gap", job.gap === null ? "–" : job.gap ? percent(job.gap) : "none", job.gap === 0 ? "proven optimal" : "at most to be gained"),
      tile("Bubble", place.dataset.bubble ?? "–", "of the devices' time"),
      tile("Memory", place.dataset.memory ?? "–", "of the limit, fullest device"),
      job.state === "running" && job.started_at ? tile("Searching", age(job.started_at, ""), limit) : searched,
    );
  }

  const redrawCurve = async () => {
    const { job, incumbents, bounds } = state;
    if (!job || !curve.isConnected) return;
    const none = element("p", "quiet", "Neither a schedule nor a bound is known.");
    if (!incumbents.length && !bounds.length) return curve.replaceChildren(none);
    const ofProblem = (/** @type {{problem_version: number}} */ each) => each.problem_version === job.problem_version;
    const since = Date.parse(job.created_at);
    const until = ((job.ended_at ? Date.parse(job.ended_at) : Date.now()) - since) / 1000;
    await drawConvergence(curve, incumbents.filter(ofProblem), bounds.filter(ofProblem), until, since, chosenSeq(job));
  };
  onThemeChange(redrawCurve, signal);
  new ResizeObserver(redrawCurve).observe(curve);

  /** @param {Job} job */
  const changed = async (job) => {
    const [{ incumbents }, { bounds }, told] = await Promise.all([
      get(`${url}/incumbents?after=0`, signal),
      get(`${url}/bounds`, signal),
      get(`${url}/log?after=${state.lastLine}&limit=${LINES}`, signal),
    ]);
    Object.assign(state, { job, incumbents, bounds });
    place.dataset.state = job.state;
    place.dataset.known = String(incumbents.length);
    const nothing = !incumbents.length && !OPEN.includes(job.state); // and nothing will come
    for (const each of [figures, searched, schedule, adoptions]) each.hidden = nothing;
    document.title = `${nameOf(job)} · OptPipe`;
    fillHead(job);
    fillFigures(job, incumbents);
    fillIncumbents(job, incumbents);
    fillAdoptions(incumbents);
    for (const line of told.lines) {
      if (line.number <= state.lastLine) continue;
      state.lastLine = line.number;
      const atEnd = log.scrollTop + log.clientHeight > log.scrollHeight - 30;
      const time = element("time", "", new Date(line.at).toLocaleTimeString());
      lines.append(element("li", line.level, time, element("span", "", line.text)));
      if (atEnd) log.scrollTop = log.scrollHeight;
    }
    redrawCurve();
    await draw();
  };

  /** @param {Job} job */
  function fillHead(job) {
    const open = OPEN.includes(job.state);
    const told = element("div", "");
    const act = (/** @type {string} */ method, /** @type {string} */ path) => () =>
      trying(told, async () => void (await ask(method, url + path)));
    const actions = element("div", "actions");
    if (open) actions.append(button("Give more time", () => extend(job)), button("Cancel", act("POST", "/cancel")));
    if (job.best) actions.append(downloads(job, told));
    actions.append(button("Delete", () => purge(job), "danger"));
    const asked = `${job.options.method}, shortest ${job.options.objective === "span" ? "span" : "makespan"}`;
    const submitted = ` ${asked}, submitted ${job.key_name ? `by ${job.key_name} ` : ""}`;
    const again = job.attempt > 1 ? `, attempt ${job.attempt}` : "";
    const changes = job.problem_version > 1 ? `, costs changed ${job.problem_version - 1} times` : "";
    const about = element("p", "quiet", badge(job), submitted, age(job.created_at), again, changes);
    const names = element("div", "names", link("#/", "Jobs", "up"), element("h1", "", nameOf(job)), about);
    refill(head, names, actions);
    const kind = job.state === "infeasible" || job.state === "failed" ? "wrong" : "plain";
    const ended = job.reason && !open ? [notice(kind, job.reason)] : [];
    said.replaceChildren(told, ...ended);
  }

  /** @param {Job} job */
  function extend(job) {
    const seconds = number({ value: job.options.time_limit_s * 2, min: 1, max: 3600 });
    dialog("Give the search more time", [field("Time limit in s", seconds, "at most 3600")], "Extend", async () => {
      const headers = { "If-Match": `"${state.job?.version ?? job.version}"` };
      await ask("PATCH", url, { body: { time_limit_s: Number(seconds.value) }, headers });
    });
  }

  /** @param {Job} job */
  function purge(job) {
    const text = "Its schedules and its log are deleted, too. If it is searching, the search ends.";
    dialog(`Delete ${nameOf(job)}?`, [element("p", "", text)], "Delete", async () => {
      await ask("DELETE", url);
      location.hash = "#/";
    });
  }

  /** @param {Job} job @param {HTMLElement} told */
  function downloads(job, told) {
    const name = nameOf(job);
    const seq = () => (which.value === BEST ? "" : which.value);
    const save = async (/** @type {string} */ end, /** @type {() => Promise<string>} */ written) =>
      download(`${name}${seq() && `-${seq()}`}${end}`, await written());
    const file = (/** @type {string} */ text, /** @type {string} */ end, /** @type {() => Promise<string>} */ written) =>
      button(text, () => trying(told, () => save(end, written)));
    const reply = async (/** @type {string} */ path) => await (await ask("GET", url + path)).text();
    const schedule = async () => JSON.parse(await reply(`/incumbents/${seq() || BEST}`)).schedule;
    const numbered = (/** @type {string} */ path) => reply(seq() ? `${path}${path.includes("?") ? "&" : "?"}seq=${seq()}` : path);
    // What needs more memory than there is, such as without offloads, is given if the user asks for it once more.
    const exported = async (/** @type {string} */ to, /** @type {string} */ end) => {
      try {
        await save(end, () => numbered(`/export?to=${to}`));
      } catch (error) {
        if (!(error instanceof Refused) || !error.message.startsWith("It does not fit")) throw error;
        const why = element("p", "", error.message.replace(/ despite_memory=.*/, ""));
        const anyway = () => save(end, () => numbered(`/export?to=${to}&despite_memory=true`));
        dialog("More memory than there is", [why], "Download all the same", anyway);
      }
    };
    const files = [
      file("Schedule, for OptPipe", ".json", async () => JSON.stringify(await schedule())),
      file("Problem", "-problem.json", async () => JSON.stringify((await schedule()).problem)),
      file("Trace, for Perfetto", "-trace.json", () => numbered("/trace")),
      ...STACKS.map(([text, to, end]) => button(text, () => trying(told, () => exported(to, end)))),
    ];
    const listed = element("ul", "", ...files.map((each) => element("li", "", each)));
    const menu = element("details", "menu", element("summary", "button", "Download"), listed);
    menu.addEventListener("keydown", (event) => event.key === "Escape" && menu.removeAttribute("open"));
    return menu;
  }

  /** @param {Job} job @param {Incumbent[]} incumbents */
  function fillIncumbents(job, incumbents) {
    const newest = incumbents.slice().reverse();
    const label = (/** @type {Incumbent} */ each) => `#${each.seq} · ${ms(each.value_ms)} · ${each.method}`;
    const options = newest.map((each) => /** @type {[string, string]} */ ([String(each.seq), label(each)]));
    fill(which, [[BEST, "the best, as it changes"], ...options], which.value);
    const differences = apart([...state.others, job]);
    const others = state.others.map((each) => /** @type {[string, string]} */ ([OTHER + each.id, `${nameOf(each)} · ${differences.get(each.id)}`]));
    fill(beside, [["", "nothing"], ...options, ...others], beside.value || (other && OTHER + other));
    other = ""; // from now on the reader's choice
    const choose = (/** @type {number} */ seq) => {
      which.value = String(seq);
      draw();
      redrawCurve();
    };
    const isOld = (/** @type {Incumbent} */ each) => each.problem_version !== job.problem_version;
    const seconds = (/** @type {Incumbent} */ each) => (Date.parse(each.found_at) - Date.parse(job.created_at)) / 1000;
    const rows = newest.map((each) => [
      button(`#${each.seq}`, () => choose(each.seq), "link"),
      ms(each.value_ms),
      each.method || each.source,
      isOld(each) ? "earlier costs" : `after ${duration(seconds(each))}`,
    ]);
    const mark = (/** @type {HTMLElement} */ row, /** @type {number} */ i) => row.classList.toggle("old", isOld(newest[i]));
    const listed = table("left", ["", "time", "found by", ""], rows, mark);
    found.replaceChildren(incumbents.length ? listed : element("p", "quiet", "None."));
  }

  /** @param {Incumbent[]} incumbents */
  function fillAdoptions(incumbents) {
    const rows = incumbents.filter(({ adoption }) => adoption);
    const none = element("p", "quiet", "No training has reported that it runs one of these schedules.");
    if (!rows.length) return adopted.replaceChildren(none);
    const cells = rows.map(({ seq, makespan_ms, adoption }) => {
      const measured = adoption?.measured_iteration_ms ?? null;
      const off = measured === null ? "" : ` (${measured >= makespan_ms ? "+" : "−"}${percent(Math.abs(measured / makespan_ms - 1))})`;
      return [`#${seq}`, `since step ${adoption?.step}`, ms(makespan_ms), measured === null ? "not yet" : ms(measured) + off];
    });
    adopted.replaceChildren(table("left adoptions", ["", "", "predicted", "measured"], cells));
  }

  const { jobs } = await get("/v1/jobs?limit=100", signal);
  state.others = jobs.filter((/** @type {Job} */ each) => each.id !== id && each.value_ms !== null);
  await follow(url, signal, changed);
}

/** Draws the best schedule over the time of a search as a line of steps, and the bound.
 * @param {HTMLElement} plot @param {Incumbent[]} incumbents of the job's current problem @param {Bound[]} bounds of it
 * @param {number} until in s since `since` @param {number} since ms, as `Date.parse` has it
 * @param {number | null} chosen an incumbent's number */
async function drawConvergence(plot, incumbents, bounds, until, since, chosen) {
  const colours = theme();
  if (!plot.classList.contains("js-plotly-plot")) plot.replaceChildren();
  const seconds = (/** @type {{found_at: string}} */ { found_at }) => Math.max(0, (Date.parse(found_at) - since) / 1000);
  const at = incumbents.map(seconds);
  const values = incumbents.map(({ value_ms }) => value_ms);
  const least = Math.min(...values, Infinity);
  const known = bounds.map(({ lower_bound_ms }) => Math.min(lower_bound_ms, least)); // a proven one may round above it
  const end = Math.max(until, ...at, 1);
  const [low, high] = [Math.min(...known, ...values), Math.max(...known, ...values)];
  const margin = Math.max(0.06 * (high - low), 0.005 * high, 1e-3);
  const last = values.length ? [values[values.length - 1]] : [];
  const traces = [
    {
      type: "scatter",
      mode: "lines",
      name: "bound",
      x: [...bounds.map(seconds), ...(bounds.length ? [end] : [])],
      y: [...known, ...known.slice(-1)],
      line: { shape: "hv", color: colours.limit, dash: "dash", width: 1.6 },
      hovertemplate: "bound %{y:.6g} ms<extra></extra>",
    },
    {
      type: "scatter",
      mode: "lines+markers",
      name: "best",
      x: [...at, ...last.map(() => end)],
      y: [...values, ...last],
      line: { shape: "hv", color: colours.accent, width: 2 },
      marker: {
        size: [...incumbents.map(({ seq }) => (seq === chosen ? 11 : 7)), ...last.map(() => 0)],
        color: colours.accent,
        line: { color: colours.ground, width: 1.5 },
      },
      text: incumbents.map(({ seq, method }) => `#${seq} ${method}`.replace(/&/g, "&amp;").replace(/</g, "&lt;")),
      hovertemplate: "%{text}<br>%{y:.6g} ms after %{x:.3g} s<extra></extra>",
    },
  ];
  const axis = { gridcolor: colours.line, zeroline: false, linecolor: colours.line, tickfont: { size: 11 } };
  const layout = {
    width: Math.max(240, plot.clientWidth),
    height: 230,
    margin: { l: 30, r: 12, t: 8, b: 34 },
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    font: { family: "system-ui, sans-serif", size: 12, color: colours.quiet },
    showlegend: false,
    hovermode: "closest",
    dragmode: false,
    xaxis: { ...axis, range: [0, end * 1.02], ticksuffix: " s", nticks: 6, showgrid: false, tickangle: 0 },
    yaxis: { ...axis, range: [low - margin, high + margin], ticksuffix: " ms", nticks: 5, automargin: true, separatethousands: true },
  };
  const bound = bounds.length ? `, bound ${ms(known[known.length - 1])}` : "";
  const best = last.length ? `, the best takes ${ms(last[0])}` : "";
  plot.setAttribute("role", "img");
  plot.setAttribute("aria-label", `Best schedule over time: ${incumbents.length} found${best}${bound}.`);
  await Plotly.react(plot, traces, layout, { displayModeBar: false });
}
