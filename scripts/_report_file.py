"""A report of simulated runs as one file: what the simulator's page draws, with its modules, its
styles and the runs inside. It opens from a disk and asks nothing of any host."""

from __future__ import annotations

import base64
import html
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

FILES = Path(__file__).resolve().parents[1] / "server" / "page"
ENTRY = "simulator/report.js"
STYLES = ("style.css", "simulator/report.css")
_IMPORT = re.compile(r'(?<=from ")/page/([^"]+)(?=")')
_PAGE = """\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; base-uri 'none'; \
script-src 'unsafe-inline' data:; style-src 'unsafe-inline'; img-src data:">
<title>{title}</title>
<link rel="icon" href="data:,">
<style>
{styles}</style>
<script type="importmap">{modules}</script>
</head>
<body>
<header><h1>loomserve</h1><span>{title}</span></header>
<main>
{notes}
<div id="report"></div>
</main>
<script type="application/json" id="runs">{runs}</script>
<script type="module">
import {{ Report }} from "{entry}";
const runs = JSON.parse(document.getElementById("runs").textContent);
new Report(document.getElementById("report")).show(runs);
</script>
</body>
</html>
"""


def write_report(
    path: Path, title: str, notes: Iterable[str], runs: Sequence[dict[str, Any]]
) -> None:
    """Writes the file.

    Args: notes: paragraphs above the figures. runs: of `runtime.simulation.run_report`."""
    page = _PAGE.format(
        title=html.escape(title),
        styles="".join((FILES / name).read_text(encoding="utf-8") for name in STYLES),
        modules=json.dumps({"imports": _modules()}),
        notes="\n".join(f"<p>{html.escape(note)}</p>" for note in notes),
        runs=_inside_script(runs),
        entry=ENTRY,
    )
    path.write_text(page, encoding="utf-8")


def _modules() -> dict[str, str]:
    """The entry and all that it imports, each as an address that holds it. A module in such an
    address has no place to count paths from, so they import one another by bare names."""
    found: dict[str, str] = {}
    waiting = [ENTRY]
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        source = (FILES / name).read_text(encoding="utf-8")
        waiting += _IMPORT.findall(source)
        encoded = base64.b64encode(_IMPORT.sub(r"\1", source).encode()).decode()
        found[name] = f"data:text/javascript;base64,{encoded}"
    return found


def _inside_script(value: Any) -> str:
    """JSON that cannot end the element that it stands in."""
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return text.replace("<", "\\u003c")
