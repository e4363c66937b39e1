"""The results as one page, for a person: no script, nothing to load, in light and in dark."""

from __future__ import annotations

from html import escape

from benchmarks.plots import Plot, plots
from benchmarks.results import Judgement, Results, Series, find
from benchmarks.style import PAGE, PLOT
from benchmarks.wording import COLUMNS, METHOD, say_ratio, say_series, say_wanted
from benchmarks.works import TORCH

_KINDS = {
    "ferry": "torchferry",
    "peer": "other transports",
    "disk": "through files",
    "limit": "what the machine can do",
}


def render(results: Results) -> str:
    """The whole page, as HTML."""
    drawn = plots(results)
    parts = [
        _head(results),
        *(_marks(results) if results.judgements else []),
        '<h2 id="plots">Plots</h2>',
        _key(),
        *(_figure(plot) for plot in drawn),
        '<h2 id="figures">All figures</h2>',
        *_tables(results),
        '<h2 id="how">How it was measured</h2>',
        *_how(results),
    ]
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>torchferry bench, {escape(results.date)}</title>\n"
        f"<style>{PAGE}{PLOT}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(parts)
        + "\n</main>\n</body>\n</html>\n"
    )


def _head(results: Results) -> str:
    machine = results.machine
    reached = sum(one.reached for one in results.judgements)
    tiles = [
        (f"{reached} of {len(results.judgements)}", "marks reached") if results.judgements else None,
        (str(len([one for one in results.series if one.takes])), "series, every arrival checked bit for bit"),
        (f"{results.repeats} ×", f"each, after a warm-up, interleaved; size {results.size}"),
    ]
    shown = "".join(
        f'<div class="tile"><b>{escape(tile[0])}</b><span class="soft small">{escape(tile[1])}</span></div>'
        for tile in tiles
        if tile is not None
    )
    return (
        "<h1>How fast torchferry moves a state</h1>"
        f'<p class="soft">{escape(results.date)} · {escape(machine.get("processor", ""))}, '
        f"{escape(machine.get('cores', '?'))} cores, {escape(machine.get('memory', '?'))} · "
        f"torch {escape(machine.get('torch', '?'))} · TCP {escape(machine.get('TCP', '?'))}</p>"
        f'<div class="tiles">{shown}</div>'
        '<nav class="small"><a href="#marks">The marks</a><a href="#plots">Plots</a>'
        '<a href="#figures">All figures</a><a href="#how">How it was measured</a></nav>'
    )


def _marks(results: Results) -> list[str]:
    note = (
        "What must be reached, as a ratio within this run."
        if results.size == "full"
        else f"The marks are for size full; this was {results.size}, so that the verdicts say little."
    )
    rows = "".join(_mark_row(one) for one in results.judgements)
    head = (
        '<tr><th>work</th><th class="number">must reach</th>'
        '<th class="number">measured (at the quartiles)</th><th>verdict</th></tr>'
    )
    return [
        f'<h2 id="marks">The marks</h2><p class="soft">{escape(note)}</p>',
        f'<div class="scroll"><table><thead>{head}</thead><tbody>{rows}</tbody></table></div>',
    ]


def _mark_row(one: Judgement) -> str:
    tone = "unsure" if one.doubtful else "good" if one.reached else "bad"
    why = f'<br><span class="soft small">{escape(one.problem)}</span>' if one.problem else ""
    return (
        f'<tr><td>{escape(one.title)}</td><td class="number">{escape(say_wanted(one))}</td>'
        f'<td class="number">{escape(say_ratio(one))}</td>'
        f'<td class="verdict {tone}">{escape(one.verdict)}{why}</td></tr>'
    )


def _key() -> str:
    entries = " &nbsp; ".join(
        f'<span class="key {kind}"></span>{escape(title)}' for kind, title in _KINDS.items()
    )
    return f'<p class="small">{entries}</p>'


def _figure(plot: Plot) -> str:
    return (
        f'<h3>{escape(plot.title)}</h3><p class="soft small">{escape(plot.says)}</p>'
        f"<figure>{plot.drawing.inline()}</figure>"
    )


def _tables(results: Results) -> list[str]:
    parts = []
    for work in results.works:
        series = results.of(work.name)
        if not series:
            continue
        several = len({one.case for one in series}) > 1
        rows = "".join(_row(results, one, find(series, one.case, TORCH), several) for one in series)
        case = "<th>case</th>" if several else ""
        numbers = "".join(f'<th class="number">{name}</th>' for name in COLUMNS)
        head = f"<tr>{case}<th>system</th>{numbers}<th>to torch's</th></tr>"
        parts.append(
            f'<h3 id="{escape(work.name)}">{escape(work.title)}</h3><div class="scroll">'
            f"<table><thead>{head}</thead><tbody>{rows}</tbody></table></div>"
        )
    return parts


def _row(results: Results, one: Series, baseline: Series | None, several: bool) -> str:
    title = results.system_title(one.system)
    case = f'<td class="case">{escape(one.case)}</td>' if several else ""
    system = f'<td class="system"><span class="key {title.kind}"></span>{escape(title.title)}</td>'
    said = say_series(one, baseline)
    if said is None:
        tone = "bad" if one.failed else "soft"
        cells = f'<td colspan="6" class="{tone}">{escape(one.problem or "not measured")}</td>'
    else:
        cells = "".join(f'<td class="number">{escape(number)}</td>' for number in said[:-1])
        cells += f"<td>{escape(said[-1])}</td>"
    return f'<tr class="{title.kind}">{case}{system}{cells}</tr>'


def _how(results: Results) -> list[str]:
    facts = {"date": results.date, **results.machine}
    listed = "".join(f"<dt>{escape(name)}</dt><dd>{escape(fact)}</dd>" for name, fact in facts.items())
    left_out = "".join(f"<li>{escape(reason)}</li>" for reason in results.left_out)
    return [
        *(f"<p>{escape(paragraph)}</p>" for paragraph in METHOD),
        f"<p><code>{escape(results.command)}</code></p><dl>{listed}</dl>",
        f"<h3>Left out</h3><ul>{left_out}</ul>" if left_out else "",
    ]
