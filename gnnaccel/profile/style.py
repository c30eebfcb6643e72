"""The page's style sheet: one column, light or dark as the reader's system is, tables that scroll where the window is narrow."""

STYLE = """
:root { color-scheme: light dark; --paper: #ffffff; --ink: #1c2024; --soft: #5b6570; --line: #d8dde3; --head: #f2f4f7;
  --ours: #1668b8; --host: #9aa5b1; --bad: #b3261e; --good: #1d7a3e; --second: #b86e16; }
@media (prefers-color-scheme: dark) { :root { --paper: #14171b; --ink: #e6e9ed; --soft: #9aa5b1; --line: #353c44; --head: #1e2329;
  --ours: #5aa9ee; --host: #6b7682; --bad: #ff8a80; --good: #6fcf8f; --second: #e3a455; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.5rem clamp(0.75rem, 3vw, 2rem) 3rem; max-width: 72rem; background: var(--paper);
  color: var(--ink); font: 15px/1.5 system-ui, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
h1 { font-size: 1.5rem; margin: 0 0 0.25rem; }
h2 { font-size: 1.1rem; margin: 2rem 0 0.4rem; padding-top: 0.6rem; border-top: 1px solid var(--line); }
h3 { font-size: 0.95rem; margin: 1rem 0 0.3rem; }
p { margin: 0.3rem 0 0.7rem; color: var(--soft); max-width: 60rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: 0.86rem; min-width: 100%; }
th, td { padding: 0.3rem 0.6rem; text-align: left; vertical-align: top; border-bottom: 1px solid var(--line); }
th { background: var(--head); font-weight: 600; white-space: nowrap; }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
td.long { min-width: 14rem; }
.good { color: var(--good); font-weight: 600; } .bad { color: var(--bad); font-weight: 600; } .soft { color: var(--soft); }
svg { display: block; width: 100%; height: auto; margin: 0.3rem 0; font: 11px ui-monospace, Menlo, Consolas, monospace; }
svg text { fill: var(--ink); } svg .small { font-size: 10px; fill: var(--soft); }
.ours { fill: var(--ours); } .host { fill: var(--host); } .other { fill: var(--second); }
.grid { stroke: var(--line); stroke-width: 1; } .mark { stroke: var(--bad); stroke-width: 1.5; stroke-dasharray: 4 3; }
.roof0 { stroke: var(--ink); stroke-width: 1.5; } .roof1 { stroke: var(--second); stroke-width: 1.5; stroke-dasharray: 6 3; }
.key { display: inline-block; width: 0.8em; height: 0.8em; border-radius: 2px; margin: 0 0.3em 0 0.9em; vertical-align: -0.05em; }
.key.ours { background: var(--ours); } .key.host { background: var(--host); } .key.other { background: var(--second); }
footer { margin-top: 2.5rem; font-size: 0.8rem; color: var(--soft); }
@media print { body { max-width: none; } }
"""
