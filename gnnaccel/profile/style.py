"""The page's style sheet: one column, light or dark as the reader's system is; in a narrow window
rows of tables become cards and charts are shown in their narrow drawing."""

STYLE = """
:root { color-scheme: light dark; --paper: #ffffff; --ink: #1c2024; --soft: #56606b; --line: #dfe3e8; --head: #f5f7f9;
  --ours: #1668b8; --host: #8d98a4; --bad: #b3261e; --good: #1a7339; --second: #b0640c; }
@media (prefers-color-scheme: dark) { :root { --paper: #14171b; --ink: #e6e9ed; --soft: #a3adb8; --line: #30363d; --head: #1d2228;
  --ours: #5aa9ee; --host: #78838f; --bad: #ff8a80; --good: #6fcf8f; --second: #e3a455; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 2rem clamp(1rem, 3vw, 2.5rem) 3rem; max-width: 74rem; background: var(--paper);
  color: var(--ink); font: 15px/1.5 system-ui, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
header p { margin: 0; }
h1 { font-size: 1.6rem; line-height: 1.2; letter-spacing: -0.01em; margin: 0 0 0.3rem; }
h2 { font-size: 1.15rem; margin: 2.75rem 0 0.25rem; }
h3 { font-size: 0.95rem; margin: 1.5rem 0 0.4rem; overflow-wrap: anywhere; }
p { margin: 0.25rem 0 0.9rem; color: var(--soft); max-width: 46rem; }
.next { background: var(--head); border: 1px solid var(--line); border-radius: 8px; padding: 0.75rem 1rem; margin-top: 1.5rem; }
.next h2 { margin: 0; } .next ol { margin: 0.5rem 0 0; padding-left: 1.4rem; } .next li { margin-bottom: 0.5rem; overflow-wrap: anywhere; }
.small { font-size: 0.8rem; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(10.5rem, 1fr)); gap: 0.75rem; margin: 1.5rem 0 0; }
.tile { background: var(--head); border: 1px solid var(--line); border-radius: 8px; padding: 0.75rem 1rem; line-height: 1.35; }
.tile .value { font-size: 1.6rem; font-weight: 600; margin: 0.1rem 0; font-variant-numeric: tabular-nums; }
.scroll { overflow-x: auto; margin: 0.5rem 0; }
table { border-collapse: collapse; font-size: 0.87rem; line-height: 1.4; width: 100%; }
th, td { padding: 0.4rem 0.75rem; text-align: left; vertical-align: top; border-bottom: 1px solid var(--line); }
th { color: var(--soft); font-weight: 600; vertical-align: bottom; border-bottom-width: 2px; }
th:first-child, td:first-child { padding-left: 0; } th:last-child, td:last-child { padding-right: 0; }
td.n, th.n { text-align: right; } td.n { font-variant-numeric: tabular-nums; white-space: nowrap; }
td.name { min-width: 9rem; max-width: 18rem; overflow-wrap: anywhere; font-weight: 600; }
td.by { min-width: 9rem; } td.long { min-width: 13rem; overflow-wrap: anywhere; }
td.code { font: 0.85em/1.6 ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace; white-space: nowrap; }
.good { color: var(--good); font-weight: 600; } .bad { color: var(--bad); font-weight: 600; } .soft, .none { color: var(--soft); }
.bars { font-size: 0.87rem; line-height: 1.35; max-width: 62rem; }
.bars .row { display: grid; grid-template-columns: minmax(9rem, 15rem) 1fr; gap: 0.2rem 1.25rem; align-items: center;
  padding: 0.4rem 0; }
.bars .name { overflow-wrap: anywhere; } .bars .name .small { display: block; }
.bar { display: flex; align-items: center; gap: 0.5rem; padding: 1px 0; font-variant-numeric: tabular-nums; }
.fill { flex: none; height: 0.95rem; min-width: 2px; border-radius: 2px; }
.fill.ours, .key.ours { background: var(--ours); } .fill.host, .key.host { background: var(--host); }
.fill.other, .key.other { background: var(--second); }
.legend { display: flex; flex-wrap: wrap; gap: 0.15rem 1.25rem; font-size: 0.87rem; margin: 0 0 0.6rem; max-width: none; }
.key { display: inline-block; width: 0.8em; height: 0.8em; border-radius: 2px; margin-right: 0.45em; vertical-align: -0.05em; }
.key.stroke { width: 1.6em; height: 0; vertical-align: 0.28em; border-radius: 0; }
.key.roof0 { border-top: 2px solid var(--ink); } .key.roof1 { border-top: 2px dashed var(--second); }
.chart { overflow-x: auto; margin: 0.4rem 0; } .little { display: none; }
svg { display: block; font: 12px system-ui, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
svg text { fill: var(--ink); } svg .small { font-size: 11px; fill: var(--soft); }
svg .number { font-weight: 600; stroke: var(--paper); stroke-width: 3px; paint-order: stroke; }
svg .ours { fill: var(--ours); } .dot { stroke: var(--paper); stroke-width: 1.5; }
.grid { stroke: var(--line); stroke-width: 1; } .axis { stroke: var(--soft); stroke-width: 1; }
.mark { stroke: var(--bad); stroke-width: 1.5; stroke-dasharray: 4 3; }
.roof0 { stroke: var(--ink); stroke-width: 1.5; } .roof1 { stroke: var(--second); stroke-width: 1.5; stroke-dasharray: 6 3; }
footer { margin-top: 3rem; padding-top: 0.75rem; border-top: 1px solid var(--line); font-size: 0.8rem; color: var(--soft); }
@media (max-width: 830px) {
  body { padding-top: 1.25rem; }
  .big { display: none; } .little { display: block; }
  .tiles { grid-template-columns: 1fr 1fr; } .tile .value { font-size: 1.35rem; }
  .bars .row { grid-template-columns: 1fr; padding: 0.5rem 0; } .bars .name .small { display: inline; margin-left: 0.5rem; }
}
@media (max-width: 1200px) { th, td { padding: 0.4rem 0.5rem; } }
@media (max-width: 1000px) {
  table, tbody { display: block; } thead { display: none; }
  tr { display: grid; grid-template-columns: repeat(auto-fit, minmax(5.5rem, 1fr)); gap: 0.35rem 1rem; padding: 0.7rem 0;
    border-bottom: 1px solid var(--line); }
  td, td.n { display: block; border: 0; padding: 0; min-width: 0; max-width: none; text-align: left; white-space: normal;
    overflow-wrap: anywhere; }
  td::before { content: attr(data-label); display: block; font: 0.78rem/1.3 system-ui, sans-serif; color: var(--soft); }
  td.name, td.by, td.long, td.list, td:first-child { grid-column: 1 / -1; min-width: 0; }
  td:first-child::before, td.by::before, td.none { display: none; }
  td:first-child { font-weight: 600; }
}
@media print { body { max-width: none; } section { break-inside: avoid; } }
"""
