// The page at /: a chat, and beside it (in its place on a narrow screen) the live view.

import { ask, hasKey } from "/page/api.js";
import { Chat } from "/page/chat.js";
import { byId } from "/page/dom.js";
import { LiveView } from "/page/live.js";

const chat = new Chat();
const live = new LiveView();
const tabs = { chat: byId("show-chat"), live: byId("show-live") };

// On a wide screen both are shown, whatever is chosen here.
function choose(name) {
  document.body.dataset.view = name;
  for (const [other, tab] of Object.entries(tabs)) {
    tab.setAttribute("aria-pressed", String(other === name));
  }
  live.look();
}

for (const [name, tab] of Object.entries(tabs)) tab.onclick = () => choose(name);
matchMedia("(min-width: 60rem)").addEventListener("change", () => live.look());
choose(location.hash === "#live" ? "live" : "chat");

const RETRY_MS = 2000;

// Fills the header; where the server cannot be reached, says so until it can.
async function meet() {
  try {
    const info = await (await ask("/server_info")).json();
    byId("model").textContent = info.model;
    byId("version").textContent = info.version;
    byId("api").hidden = hasKey(); // a link cannot send one
    chat.heed(info);
  } catch (error) {
    byId("model").textContent = error.message;
    if (!error.status) setTimeout(meet, RETRY_MS);
  }
}

meet();
