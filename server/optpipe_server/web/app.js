// The page: which part of it the address names, whether the service answers, and the reader's key.
import { button, element } from "/page/picture/panel.js";
import { Refused, STORED_KEY, connection } from "./api.js";
import { showDiagnose, showSubmit } from "./files.js";
import { showJob } from "./job.js";
import { showJobs } from "./jobs.js";
import { empty, field, link } from "./parts.js";
import { showWorkbench } from "./workbench.js";

const content = /** @type {HTMLElement} */ (document.getElementById("content"));
const offline = /** @type {HTMLElement} */ (document.getElementById("offline"));
const status = /** @type {HTMLElement} */ (document.getElementById("connection"));

connection.changed = (away) => {
  if (document.body.dataset.connection === (away ? "away" : "there")) return;
  offline.hidden = !away;
  offline.textContent = away ? "The service does not answer. You see its last reply; it is asked again every second." : "";
  status.className = away ? "away" : "";
  status.textContent = away ? "offline" : "connected";
  document.body.dataset.connection = away ? "away" : "there";
};

/** By path: title, and what shows the page.
 * @type {Record<string, [string, (place: HTMLElement, signal: AbortSignal, query: URLSearchParams) => unknown]>} */
const PAGES = {
  "/": ["Jobs", showJobs],
  "/workbench": ["Workbench", showWorkbench],
  "/diagnose": ["Diagnose a trace", showDiagnose],
  "/submit": ["Submit a problem", showSubmit],
};

/** @type {AbortController | null} */
let shown = null;

async function route() {
  const [path, query = ""] = location.hash.replace(/^#/, "").split("?");
  if (path === "content") return; // the link that skips to it
  shown?.abort();
  shown = new AbortController();
  const { signal } = shown;
  const place = element("div", "page");
  content.replaceChildren(place);
  const job = /^\/jobs\/([0-9a-f]{32})$/.exec(path);
  const page = PAGES[path || "/"];
  document.title = `${job ? "Job" : (page?.[0] ?? "Not found")} · OptPipe`;
  for (const each of document.querySelectorAll("nav a")) {
    const here = (each.getAttribute("href") ?? "").slice(1) === (job ? "/" : path || "/");
    if (here) each.setAttribute("aria-current", "page");
    else each.removeAttribute("aria-current");
  }
  try {
    if (job) await showJob(place, job[1], new URLSearchParams(query).get("beside") ?? "", signal);
    else if (page) await page[1](place, signal, new URLSearchParams(query));
    else place.replaceChildren(empty("There is no such page", "The address names none.", link("#/", "All jobs", "button")));
  } catch (error) {
    if (!signal.aborted) place.replaceChildren(failed(/** @type {Error} */ (error)));
  }
}

/** What is shown in place of a page that cannot be shown.
 * @param {Error} error */
function failed(error) {
  if (error instanceof Refused && error.status === 401) return askForKey();
  if (error instanceof Refused && error.status === 404)
    return empty("There is no such job", "It was deleted.", link("#/", "All jobs", "button"));
  return empty("This cannot be shown", error.message, button("Try again", route, "primary"));
}

function askForKey() {
  const key = element("input", { type: "password", autocomplete: "off", spellcheck: "false" });
  const form = element("form", "", field("Key", key), element("button", "primary", "Go on"));
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    sessionStorage.setItem(STORED_KEY, key.value.trim());
    route();
  });
  const title = sessionStorage.getItem(STORED_KEY) !== null ? "This key is not valid" : "This service needs a key";
  const how = "On the service's machine, optpipe keys create NAME --scope submit --scope read makes one. It stays in this tab, and is gone when you close it.";
  return element("div", "key", empty(title, how, form));
}

addEventListener("hashchange", () => {
  route();
  content.focus({ preventScroll: true });
  scrollTo(0, 0);
});
route();
