"""The report's style sheet: one column of calm text, numbers that line up, light or dark as the reader's system is."""

STYLE = """
:root {
  color-scheme: light dark;
  --paper: #fdfdfc; --panel: #f6f6f3; --ink: #20211f; --muted: #6d6e69; --rule: #e3e2dd; --grid: #ecebe6;
  --good: #22794f; --bad: #b3372f; --warn: #946200;
  --stage-base: #a3a49e; --stage-cold: #7fa6d6; --stage-rl: #2463ab;
  --series-0: #2463ab; --series-1: #c05a1c; --series-2: #22794f; --series-3: #8455ad;
  --series-4: #a37c0c; --series-5: #bb3f74; --series-6: #287f8f; --series-7: #6c6d68;
}
@media (prefers-color-scheme: dark) {
  :root {
    --paper: #171816; --panel: #1f201e; --ink: #e6e6e1; --muted: #9b9c96; --rule: #343531; --grid: #2a2b28;
    --good: #6cc297; --bad: #ef8178; --warn: #d9ab4e;
    --stage-base: #7d7e78; --stage-cold: #5f86b8; --stage-rl: #84b6f2;
    --series-0: #84b6f2; --series-1: #eb9a63; --series-2: #6cc297; --series-3: #bf98e6;
    --series-4: #d3b04c; --series-5: #ec8bb2; --series-6: #6fc0cf; --series-7: #a5a6a0;
  }
}
* { box-sizing: border-box; }
html { scroll-behavior: smooth; }
body {
  margin: 0; background: var(--paper); color: var(--ink);
  font: 15px/1.55 ui-sans-serif, system-ui, "Segoe UI", "Helvetica Neue", Arial, sans-serif;
  font-variant-numeric: tabular-nums;
}
main { max-width: 1120px; margin: 0 auto; padding: 40px 32px 96px; }
h1 { font-size: 26px; line-height: 1.2; font-weight: 650; letter-spacing: -0.015em; margin: 0; }
h2 { font-size: 18px; font-weight: 620; letter-spacing: -0.01em; margin: 64px 0 6px; }
h3 { font-size: 14px; font-weight: 620; margin: 28px 0 8px; }
p { margin: 6px 0 12px; max-width: 74ch; }
.muted, .lead { color: var(--muted); }
.lead { margin-bottom: 18px; }
header { display: flex; gap: 16px; align-items: baseline; flex-wrap: wrap; }
header .facts { color: var(--muted); flex-basis: 100%; font-size: 13.5px; }
nav { margin: 14px 0 0; font-size: 13.5px; display: flex; gap: 18px; flex-wrap: wrap; }
a { color: var(--stage-rl); text-decoration: none; }
a:hover { text-decoration: underline; }
.pill { font-size: 12px; font-weight: 600; padding: 2px 10px; border-radius: 99px; border: 1px solid currentColor; }
.good { color: var(--good); } .bad { color: var(--bad); } .warn { color: var(--warn); }
.notes { border-left: 3px solid var(--warn); background: var(--panel); padding: 10px 16px; margin: 22px 0 0; }
.notes p { margin: 2px 0; }

.verdict-line { font-size: 21px; line-height: 1.4; letter-spacing: -0.01em; margin: 30px 0 22px; max-width: 58ch; }
.verdict-line strong { font-weight: 650; }
.headline { display: grid; grid-template-columns: minmax(250px, 330px) 1fr; gap: 44px; align-items: center; }
.stages { display: grid; gap: 18px; }
.stage { display: grid; grid-template-columns: 12px 1fr; gap: 2px 12px; align-items: baseline; }
.stage .dot { width: 10px; height: 10px; border-radius: 99px; }
.stage .name { color: var(--muted); font-size: 13.5px; }
.stage .value { grid-column: 2; font-size: 32px; line-height: 1.1; font-weight: 640; letter-spacing: -0.02em; }
.stage .value small { font-size: 13.5px; font-weight: 400; letter-spacing: 0; color: var(--muted); margin-left: 8px; }

.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(420px, 1fr)); gap: 30px 40px; }
figure { margin: 0; min-width: 0; }
figcaption { font-size: 14px; font-weight: 620; margin-bottom: 6px; }
figcaption small { font-weight: 400; color: var(--muted); margin-left: 8px; font-size: 12.5px; }
svg.chart { width: 100%; height: auto; display: block; overflow: visible; }
svg text { font-size: 11px; font-family: inherit; fill: var(--ink); }
svg .tick { fill: var(--muted); }
svg .end { font-weight: 600; }
svg .row-name { font-size: 12.5px; }
svg .grid { stroke: var(--grid); stroke-width: 1; }
svg .line { fill: none; stroke-width: 2; stroke-linejoin: round; stroke-linecap: round; }
svg .faint { stroke-width: 1; opacity: 0.32; }
svg .hover { opacity: 0; }
svg .hover:hover { opacity: 1; }
svg .broken { fill: var(--bad); font-weight: 700; }
svg .whisker { stroke-width: 2; stroke-linecap: round; opacity: 0.5; }
svg .meter { fill: var(--rule); }
svg.meter-box { width: 60px; height: 6px; vertical-align: 2px; margin-left: 10px; }

.scroll { overflow-x: auto; }
table { border-collapse: collapse; min-width: 46%; font-size: 14px; }
table.wide { width: 100%; }
th { text-align: left; font-weight: 500; color: var(--muted); font-size: 12.5px; }
th, td { padding: 6px 14px 6px 0; border-bottom: 1px solid var(--rule); vertical-align: baseline; }
td.num, th.num { text-align: right; padding-right: 18px; white-space: nowrap; }
tr.domain td { font-weight: 620; border-top: 14px solid transparent; background-clip: padding-box; }
tr.total td { font-weight: 620; }
td.kind { padding-left: 16px; }
.share { display: flex; height: 12px; border-radius: 6px; overflow: hidden; margin: 14px 0 8px; gap: 2px; }
.key { display: flex; flex-wrap: wrap; gap: 4px 22px; font-size: 13.5px; margin-bottom: 18px; }
.key i { display: inline-block; width: 9px; height: 9px; border-radius: 99px; margin-right: 7px; }

.check {
  display: grid; grid-template-columns: 84px 1fr; gap: 2px 12px; padding: 9px 0; border-bottom: 1px solid var(--rule);
}
.check > div { min-width: 0; }
.check .status { font-weight: 620; font-size: 13.5px; }
details.others { margin-top: 26px; }
details.others > summary { margin-bottom: 18px; }
details summary { cursor: pointer; color: var(--muted); font-size: 13.5px; }
details summary:hover { color: var(--ink); }
pre, code { font: 12.8px/1.5 ui-monospace, "SF Mono", "Cascadia Mono", "DejaVu Sans Mono", Menlo, monospace; }
pre { margin: 0; white-space: pre-wrap; overflow-wrap: anywhere; }

.episode { border: 1px solid var(--rule); border-radius: 10px; margin: 12px 0; overflow: hidden; }
.episode > summary {
  list-style: none; display: flex; gap: 14px; align-items: baseline; padding: 11px 18px;
  color: var(--ink); font-size: 14px;
}
.episode > summary::-webkit-details-marker { display: none; }
.episode > summary::before { content: "▸"; color: var(--muted); }
.episode[open] > summary::before { content: "▾"; }
.episode > summary .facts { margin-left: auto; color: var(--muted); font-size: 12.5px; text-align: right; }
.episode .body { padding: 2px 18px 18px; }
.said { display: grid; grid-template-columns: 96px 1fr; gap: 14px; padding: 9px 0; }
.said > span { color: var(--muted); font-size: 12.5px; padding-top: 9px; }
.said pre { padding: 9px 13px; border-radius: 7px; background: var(--panel); min-width: 0; }
.said.policy pre { background: none; border: 1px solid var(--stage-rl); }
.said .flag { color: var(--warn); font-size: 12.5px; margin: 4px 0 0; }
.findings { margin: 0; padding: 7px 0 0 18px; font-size: 14px; }
.parts { font-size: 13.5px; padding-top: 7px; color: var(--muted); }
footer { margin-top: 72px; color: var(--muted); font-size: 12.5px; }

@media (max-width: 860px) {
  main { padding: 24px 18px 64px; }
  .headline { grid-template-columns: 1fr; gap: 26px; }
  .charts { grid-template-columns: 1fr; }
  .said { grid-template-columns: 1fr; gap: 2px; }
}
@media print { .episode { break-inside: avoid; } nav { display: none; } }
"""
