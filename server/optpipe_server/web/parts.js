// @ts-check
// Pieces that several pages have: cards, notices, fields, ages, downloads. All text is text.
import { button, element } from "/page/picture/panel.js";

/** @param {string} href
 * @param {string} text
 * @param {string} [className] */
export function link(href, text, className = "") {
  const made = /** @type {HTMLAnchorElement} */ (element("a", className, text));
  made.href = href;
  return made;
}

/** A part of a page with a heading of its own.
 * @param {string} title
 * @param {...(Node | string)} children */
export function card(title, ...children) {
  return element("section", "card", element("h2", "", title), ...children);
}

/** What is said in place of something that is not there.
 * @param {string} title
 * @param {string} text
 * @param {...Node} actions */
export function empty(title, text, ...actions) {
  return element(
    "div",
    "empty",
    element("h2", "", title),
    element("p", "", text),
    element("div", "actions", ...actions),
  );
}

/** A sentence that stands out. `kind` is wrong, good or plain.
 * @param {string} kind
 * @param {string} text */
export function notice(kind, text) {
  const made = element("p", `notice ${kind}`, text);
  made.setAttribute("role", kind === "wrong" ? "alert" : "status");
  return made;
}

/** @param {string} label
 * @param {HTMLElement} input
 * @param {string} [hint] */
export function field(label, input, hint) {
  const made = element("label", "field", element("span", "", label), input);
  if (hint) made.append(element("small", "", hint));
  return made;
}

/** @param {{value: string | number, min?: number, max?: number, step?: number | "any"}} of */
export function number({ value, min, max, step = 1 }) {
  const made = document.createElement("input");
  made.type = "number";
  made.value = String(value);
  if (min !== undefined) made.min = String(min);
  if (max !== undefined) made.max = String(max);
  made.step = String(step);
  return made;
}

/** @param {[string, string][]} options values and texts
 * @param {string} chosen
 * @param {(value: string) => void} [changed] */
export function choice(options, chosen, changed) {
  const made = document.createElement("select");
  fill(made, options, chosen);
  if (changed) made.addEventListener("change", () => changed(made.value));
  return made;
}

/** Gives a choice other options; what the reader has open stays as it is if they are the same.
 * @param {HTMLSelectElement} select
 * @param {[string, string][]} options
 * @param {string} chosen */
export function fill(select, options, chosen) {
  const known = JSON.stringify(options);
  if (select.dataset.options !== known) {
    select.dataset.options = known;
    select.replaceChildren(
      ...options.map(([value, text]) => {
        const option = document.createElement("option");
        option.value = value;
        option.textContent = text;
        return option;
      }),
    );
  }
  select.value = chosen;
}

const STATES = {
  queued: "waiting",
  running: "searching",
  done: "done",
  infeasible: "infeasible",
  failed: "failed",
  cancelled: "cancelled",
};

/** A job's state. A proven answer is told apart from one that ran out of time.
 * @param {{state: string, status: string}} job */
export function badge({ state, status }) {
  const text = state === "done" && status === "optimal" ? "optimal" : (STATES[/** @type {never} */ (state)] ?? state);
  return element("span", `badge ${state}`, text);
}

/** The name of a job, or what stands for it.
 * @param {{problem_name: string, id: string}} job */
export function nameOf({ problem_name, id }) {
  return problem_name || `job ${id.slice(0, 8)}`;
}

/** @param {number} seconds */
export function duration(seconds) {
  const whole = Math.max(0, Math.round(seconds));
  if (whole < 60) return `${whole} s`;
  const [large, small, unit, part] =
    whole < 3600 ? [60, 1, "min", "s"] : whole < 86400 ? [3600, 60, "h", "min"] : [86400, 3600, "d", "h"];
  const rest = Math.floor((whole % Number(large)) / Number(small));
  return `${Math.floor(whole / Number(large))} ${unit}${rest ? ` ${rest} ${part}` : ""}`;
}

/** How long ago a moment was; it is kept up to date.
 * @param {string} at
 * @param {string} [after] */
export function age(at, after = " ago") {
  const made = document.createElement("time");
  made.dateTime = at;
  made.title = new Date(at).toLocaleString();
  made.dataset.after = after;
  tick(made);
  return made;
}

/** @param {HTMLTimeElement} time */
function tick(time) {
  const seconds = (Date.now() - Date.parse(time.dateTime)) / 1000;
  const said = duration(seconds < 120 ? seconds : Math.round(seconds / 60) * 60);
  time.textContent = said + (time.dataset.after ?? "");
}

setInterval(() => {
  for (const time of document.querySelectorAll("time[data-after]")) tick(/** @type {HTMLTimeElement} */ (time));
}, 1000);

/** Hands the reader a file.
 * @param {string} name
 * @param {BlobPart} content */
export function download(name, content) {
  const address = URL.createObjectURL(new Blob([content]));
  const hidden = link(address, "");
  hidden.download = name.replace(/[^\w.-]+/g, "-");
  hidden.click();
  setTimeout(() => URL.revokeObjectURL(address), 1000);
}

/** Asks something in a dialog; `act` is done if the reader agrees, and its error is told there.
 * @param {string} title
 * @param {Node[]} content
 * @param {string} agree
 * @param {() => Promise<void>} act */
export function dialog(title, content, agree, act) {
  const made = document.createElement("dialog");
  const told = element("div", "");
  const go = button(
    agree,
    async () => {
      go.disabled = true;
      try {
        await act();
        made.close();
      } catch (error) {
        told.replaceChildren(notice("wrong", String(/** @type {Error} */ (error).message)));
        go.disabled = false;
      }
    },
    "primary",
  );
  made.append(
    element("h2", "", title),
    ...content,
    told,
    element("div", "actions", button("Back", () => made.close()), go),
  );
  made.setAttribute("aria-label", title);
  made.addEventListener("close", () => made.remove());
  document.body.append(made);
  made.showModal();
}

/** Shows what an action answers if it fails.
 * @param {HTMLElement} place
 * @param {() => Promise<void>} act */
export async function trying(place, act) {
  place.replaceChildren();
  try {
    await act();
  } catch (error) {
    place.replaceChildren(notice("wrong", String(/** @type {Error} */ (error).message)));
  }
}
