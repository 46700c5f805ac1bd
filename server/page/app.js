// The page at /.

import { Timeline } from "/page/timeline.js";

new Timeline(document.getElementById("timeline"), { label: "Steps of the server" }).show([]);
