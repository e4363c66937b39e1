"""How the page and the plots look, in light and in dark. One colour for each kind of system."""

from __future__ import annotations

_LIGHT = """
  --ground: #ffffff; --panel: #f6f7f9; --ink: #1b2330; --soft: #5a6675; --rule: #dde2e8;
  --ferry: #1769d6; --peer: #d9730d; --disk: #8250c4; --limit: #8a94a0;
  --good: #12803c; --bad: #c62f2f; --unsure: #9a6700;
"""
_DARK = """
  --ground: #12161c; --panel: #1a2028; --ink: #e6eaf0; --soft: #9aa6b4; --rule: #2c3540;
  --ferry: #5aa2ff; --peer: #f2994a; --disk: #b48cf2; --limit: #8793a1;
  --good: #4cc77c; --bad: #ff7b72; --unsure: #e0b341;
"""

# The colours of phases, told apart by hue and by lightness.
_PHASES = ("#9ecae9", "#1769d6", "#f2b880", "#d9730d", "#7fc8a0", "#8250c4", "#c9a227", "#8a94a0")

PLOT = f"""
svg {{ {_LIGHT} font-family: system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }}
@media (prefers-color-scheme: dark) {{ svg {{ {_DARK} }} }}
svg text {{ font-size: 12.5px; fill: var(--ink); }}
svg .tick {{ fill: var(--soft); font-size: 11.5px; }}
svg .value {{ font-variant-numeric: tabular-nums; }}
svg .grid {{ stroke: var(--rule); stroke-width: 1; }}
svg .whisker {{ stroke: var(--ink); stroke-width: 1.5; opacity: 0.65; }}
svg .fill.ferry {{ fill: var(--ferry); }} svg .fill.peer {{ fill: var(--peer); }}
svg .fill.disk {{ fill: var(--disk); }} svg .fill.limit {{ fill: var(--limit); }}
svg .curve {{ fill: none; stroke-width: 2.25; stroke-linejoin: round; }}
svg .curve.ferry {{ stroke: var(--ferry); }} svg .curve.peer {{ stroke: var(--peer); }}
svg .curve.disk {{ stroke: var(--disk); }} svg .curve.limit {{ stroke: var(--limit); stroke-dasharray: 2 4; }}
svg .curve.torchferry-unverified {{ stroke-dasharray: 6 4; }}
svg .end.ferry {{ fill: var(--ferry); font-weight: 600; }} svg .end.peer {{ fill: var(--peer); }}
svg .end.disk {{ fill: var(--disk); }} svg .end.limit {{ fill: var(--soft); }}
""" + "".join(f"svg .p{number} {{ fill: {colour}; }}\n" for number, colour in enumerate(_PHASES))

PAGE = f"""
:root {{ color-scheme: light dark; {_LIGHT} }}
@media (prefers-color-scheme: dark) {{ :root {{ {_DARK} }} }}
* {{ box-sizing: border-box; }}
body {{ margin: 0; background: var(--ground); color: var(--ink); line-height: 1.5;
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }}
main {{ max-width: 60rem; margin: 0 auto; padding: 2.5rem 1.25rem 4rem; }}
h1 {{ font-size: 2rem; line-height: 1.2; margin: 0 0 0.25rem; letter-spacing: -0.01em; }}
h2 {{ font-size: 1.35rem; margin: 3rem 0 0.75rem; padding-top: 1rem; border-top: 1px solid var(--rule); }}
h3 {{ font-size: 1rem; margin: 1.75rem 0 0.1rem; }}
p {{ margin: 0.4rem 0; }} .soft {{ color: var(--soft); }} .small {{ font-size: 0.875rem; }}
a {{ color: var(--ferry); }}
nav {{ margin: 1rem 0 0; }} nav a {{ margin-right: 1.25rem; }}
.tiles {{ display: flex; flex-wrap: wrap; gap: 0.75rem; margin: 1.5rem 0; }}
.tile {{ background: var(--panel); border-radius: 10px; padding: 0.8rem 1.1rem; min-width: 10rem; flex: 1; }}
.tile b {{ display: block; font-size: 1.5rem; line-height: 1.25; font-variant-numeric: tabular-nums; }}
figure {{ margin: 0.5rem 0 0; background: var(--panel); border-radius: 10px; padding: 1rem 1rem 0.5rem; }}
figure svg {{ display: block; width: 100%; height: auto; }}
.scroll {{ overflow-x: auto; }}
table {{ border-collapse: collapse; width: 100%; font-size: 0.875rem; margin: 0.5rem 0 0; }}
th {{ text-align: left; font-weight: 600; color: var(--soft); border-bottom: 1px solid var(--rule); }}
th, td {{ padding: 0.38rem 0.9rem 0.38rem 0; vertical-align: top; }}
td {{ border-bottom: 1px solid var(--rule); }}
.number {{ text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; }}
td.case {{ white-space: nowrap; color: var(--soft); }}
tr.ferry td:first-child, tr.ferry td.system {{ font-weight: 600; }}
.key {{ display: inline-block; width: 0.7em; height: 0.7em; border-radius: 2px; margin-right: 0.45em; }}
.key.ferry {{ background: var(--ferry); }} .key.peer {{ background: var(--peer); }}
.key.disk {{ background: var(--disk); }} .key.limit {{ background: var(--limit); }}
.verdict {{ white-space: nowrap; font-weight: 600; }}
.good {{ color: var(--good); }} .bad {{ color: var(--bad); }} .unsure {{ color: var(--unsure); }}
code {{ font: 0.875em ui-monospace, "SF Mono", Menlo, Consolas, monospace; background: var(--panel);
  border-radius: 5px; padding: 0.1em 0.35em; overflow-wrap: anywhere; }}
dl {{ display: grid; grid-template-columns: max-content 1fr; gap: 0.2rem 1.5rem; margin: 0.5rem 0; }}
dt {{ color: var(--soft); }} dd {{ margin: 0; }}
"""
