"""Write reports as files: HTML that needs no network, Markdown, and JSON."""

import html
import json
from collections.abc import Sequence
from dataclasses import asdict
from importlib.resources import files
from pathlib import Path

from ..bench.files import make_folder, write_whole
from .changes import changes, differences
from .load import Results, load
from .sections import Section, sections, summary
from .tables import plain

TITLE = "Attention on CPUs: attn_engine and other libraries"


def write_reports(paths: Sequence[Path], folder: Path) -> list[Path]:
    """Write report.html, report.md and report.json.

    Parameters
    ----------
    paths : sequence of Path
        Result files; the first is reported, and every other one is compared with it.
    folder : Path
        The folder to write to; it is made if it does not exist.

    Returns
    -------
    list of Path
        The files that were written.

    Raises
    ------
    BadInput
        A file is not a result file, or the folder is not writable.
    """
    results, *others = map(load, paths)
    make_folder(folder)
    found = sections(results, others)
    texts = {
        "report.html": as_html(found),
        "report.md": as_markdown(found),
        "report.json": as_json(results, others),
    }
    for name, text in texts.items():
        write_whole(folder / name, text)
    return [folder / name for name in texts]


def as_html(found: Sequence[Section]) -> str:
    """Return one page with everything inside."""
    body = []
    for section in found:
        parts = [f"<section><h2>{html.escape(section.title)}</h2>"]
        parts += [f"<p>{html.escape(line)}</p>" for line in section.text]
        if section.charts:
            parts.append(f'<div class="charts" tabindex="0">{"".join(section.charts)}</div>')
        if section.table:
            parts.append(section.table.as_html())
        parts += [f"<pre>{html.escape(line)}</pre>" for line in section.code]
        body.append("".join(parts) + "</section>")
    template = files(__package__).joinpath("page.html").read_text(encoding="utf-8")
    head, tail = template.replace("{{title}}", html.escape(TITLE)).split("{{body}}")
    return head + "\n".join(body) + tail


def as_markdown(found: Sequence[Section]) -> str:
    """Return the text and tables; only the page has the charts."""
    parts = [f"# {TITLE}\n"]
    for section in found:
        parts.append(f"## {plain(section.title)}\n")
        parts += [f"{plain(line)}\n" for line in section.text]
        if section.charts:
            parts.append(f"Drawn in report.html: {len(section.charts)}.\n")
        if section.table:
            parts.append(section.table.as_markdown())
        if section.code:
            parts.append(
                "\n".join(["```sh", *(" ".join(line.split()) for line in section.code), "```\n"])
            )
    return "\n".join(parts)


def as_json(results: Results, others: Sequence[Results]) -> str:
    """Return the numbers of the report, for programs."""
    report = {
        "file": str(results.path),
        "command": results.command,
        "date": results.date,
        "finished": results.finished,
        "machine": results.machine,
        "versions": results.versions,
        "threads": results.threads,
        "noise": results.noise,
        "summary": summary(results),
        "cases": [
            {"suite": timed.suite, "threads": timed.threads, "case": timed.case.name}
            | {"ratio": timed.comparison.ratio, "best_peer": timed.comparison.best_peer}
            | {"seconds": timed.comparison.seconds}
            for timed in results.timed
        ],
        "memory": results.memory,
        "compared": [
            {"file": str(other.path), "differences": differences(results, other)}
            | {"changes": list(map(asdict, changes(results, other)))}
            for other in others
        ],
    }
    return json.dumps(report, indent=1) + "\n"
