// The page of one picture: reads its document, and shows it.
import { read } from "./data.js";
import { showDiagnosis } from "./diagnosis.js";
import { element, heading } from "./panel.js";
import { show } from "./picture.js";

const source = document.getElementById("document");
const place = document.getElementById("picture");
if (source?.textContent && place) {
  const found = read(source.textContent);
  if (found.diagnosis) await showDiagnosis(place, found);
  else {
    const picture = element("div", "");
    place.replaceChildren(heading(found), picture);
    await show(picture, found);
    place.dataset.drawn = "true";
  }
}
