"""``python -m gnnaccel bench``: options, and the loop that stores every record as soon as there is
one."""
from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable

from gnnaccel.profile.bench import result as results
from gnnaccel.profile.bench.result import Record, Result, progress

#: by name, the module with ``from_options``, which makes a plan of the options and raises
#: ValueError on names that do not exist, devices that are not there and options that mean nothing
#: to the suite; and the function of (plan, budget) that yields records, what matters most first
SUITES = {"attention": ("suite_attention", "attention"),
          "attention-kernel": ("suite_attention", "attention_kernel"),
          "relational": ("suite_relational", "relational"), "dgl": ("suite_dgl", "dgl"),
          "aggregate": ("suite_aggregate", "aggregate"),
          "segment-gemm": ("suite_segment", "segment_gemm"),
          "quantized": ("suite_quantized", "quantized"), "peers": ("suite_peers", "peers_suite"),
          "scripts": ("suite_scripts", "scripts")}


def add_parser(commands) -> None:
    parser = commands.add_parser("bench",
                                 help="measure gnnaccel against the host and torch.compile")
    parser.set_defaults(run=run)
    _add_what(parser)
    _add_effort(parser)
    _add_scripts(parser)
    report = parser.add_argument_group("reports")
    report.add_argument("--out", metavar="FILE.json", help="written after every cell")
    report.add_argument("--table", nargs="?", const="rich", choices=("rich", "markdown"))
    report.add_argument("--plot", metavar="FILE.png")
    report.add_argument("--from", dest="read", nargs="+", metavar="FILE.json",
                        help="report on these; measure nothing")


def _add_what(parser) -> None:
    measured = parser.add_argument_group("what is measured")
    measured.add_argument("--suite", default="attention", choices=tuple(SUITES))
    measured.add_argument("--shapes", type=_names, nargs="+", metavar="NAME,...",
                          help="attention, aggregate: "
                               "cora,arxiv,proteins,reddit,products,hub,uniform,tiny or a path to "
                               "an .npz; relational: "
                               "aifb-size,fb15k-size,am-size,mag-size,mag-inverse-size,"
                               "wikikg2-size,hetero-64,hetero-16,dblp-size,"
                               "tiny-typed or, with --data, a file's name without .npz; dgl: any "
                               "of these, without --data; segment-gemm: aifb64,fb15k128,...; "
                               "quantized: as attention")
    measured.add_argument("--data", metavar="DIR",
                          help="relational: real graphs, one .npz each with edge_index, edge_type, "
                               "num_nodes, num_relations; they replace the synthetic ones of their "
                               "kind")
    measured.add_argument("--layers", type=_names, nargs="+", metavar="NAME,...",
                          help='as "GAT 8x8" or gat8x8, "RGCN 64" or rgcn64; dgl: '
                               "gat8x8,gatv24x16,dotgat1x64,graphconv64,sage64,"
                               "relgraphconv64,hgt4x16; aggregate: "
                               "gcn64,sage64,gcn128,sage128,gin64,sagemax64,pna64; peers: "
                               "gat8x8,gatv21x64,transformer1x64,gcn64,sage64,sagemax64; "
                               "segment-gemm: "
                               "fp32,tf32,bf16; quantized: "
                               "gcn64,gcn128,gcn256,sage128,gat8x8,gat1x128, "
                               "gcn2layers128,sage2layers128,gat2layers8x16")
    measured.add_argument("--parts", type=_names, nargs="+", metavar="NAME,...",
                          help="attention: only these of "
                               "floor,layers,structure,overhead,fresh,cpu,compiled; relational: of "
                               "layers,memory,compaction,cpu,once; once, graphs new in each call "
                               "with sizes and layers of its own (as "
                               "rgcnmax,hgt4heads,heteroconvsage), runs only where named; "
                               "aggregate: of floor,layers,spmm,operations,fresh,cpu,compiled; "
                               "quantized: of kernels,models; scripts: of "
                               "native,cold,gnnaccel,capture,bound")
    measured.add_argument("--native", action=argparse.BooleanOptionalAction, default=True,
                          help="--no-native: leave the host itself out of the layer cells; merge "
                               "with --from instead")
    measured.add_argument("--device", help="cuda or cpu; cuda when there is one")
    measured.add_argument("--order", default="random", choices=("random", "dst"),
                          help="order of the edges")
    measured.add_argument("--seed", type=int, default=0)


def _add_effort(parser) -> None:
    effort = parser.add_argument_group("how long")
    effort.add_argument("--quick", action="store_true",
                        help="a tiny graph and few repetitions, to see that it runs")
    effort.add_argument("--repeat", type=int, metavar="N", help="timed batches per cell; "
                        "scripts: runs of each part, the fastest of which counts (1)")
    effort.add_argument("--compile", action=argparse.BooleanOptionalAction, default=None,
                        help="torch.compile too (default: on a GPU, unless --quick)")
    effort.add_argument("--compile-limit", type=float, default=75.0, metavar="SECONDS",
                        help="per mode of a layer")
    effort.add_argument("--budget", type=float, default=330.0, metavar="SECONDS",
                        help="start no cell after this")
    effort.add_argument("--patience", type=float, default=20.0, metavar="SECONDS",
                        help="relational, dgl, aggregate: a call that takes longer is timed by "
                             "that one run")


def _add_scripts(parser) -> None:
    scripts = parser.add_argument_group("scripts", "options of --suite scripts")
    scripts.add_argument("--scripts", nargs="+", metavar="SCRIPT",
                         help="paths, patterns as 'examples/*.py', or a script with its arguments "
                              "as \"train.py --epochs 5\"")
    scripts.add_argument("--steps", type=int, default=200, metavar="N",
                         help="stop a script after so many steps (default 200)")
    scripts.add_argument("--seconds", type=float, default=10.0, metavar="S",
                         help="stop the native run so long after its first step, and the others "
                              "after as many steps (default 10)")
    scripts.add_argument("--limit", type=float, default=120.0, metavar="SECONDS",
                         help="end a run that takes longer (default 120)")
    scripts.add_argument("--exact", action="store_true",
                         help="dropout off, so that losses have to agree")
    scripts.add_argument("--before", metavar="FILE.py",
                         help="run this file in each process before the script")
    scripts.add_argument("--preload", type=_names, nargs="+", metavar="NAME,...",
                         help="modules or .py files that are loaded once, in a process that each "
                              "run is forked from; wall times are then without them")


def run(options, arguments: list[str]) -> int:
    """Measure, or read what was measured, and report. Returns 0, or 1 when the device was lost, 2
    on a bad option."""
    try:
        if options.read:
            read, plan = results.merge([results.load(path) for path in options.read]), None
        else:
            if options.data and options.suite != "relational":
                raise ValueError("--data belongs to --suite relational")
            if options.scripts and options.suite != "scripts":
                raise ValueError("--scripts belongs to --suite scripts")
            plan = _suite(options)[0](options)
    except (ValueError, OSError) as problem:
        progress(f"bench: {problem}")
        return 2
    if plan is None:
        report(read, options)
        return 0
    from gnnaccel.profile.bench.plan import settings

    result, status = measure(plan, options, Result(results.provenance(arguments),
                                                   settings(options)))
    report(result, options)
    return status


def _suite(options) -> tuple[Callable, Callable]:
    """What makes the plan of the suite asked for, and what runs it."""
    module, run_it = SUITES[options.suite]
    found = importlib.import_module(f"gnnaccel.profile.bench.{module}")
    return found.from_options, getattr(found, run_it)


def measure(plan, options, result: Result) -> tuple[Result, int]:
    """Run the suite until it ends or the budget is spent, adding to ``result``; returns it and the
    exit status."""
    from gnnaccel.profile.bench.guard import Budget, DeviceLost

    budget = Budget(options.budget)
    status = 0
    try:
        for record in _suite(options)[1](plan, budget):
            _store(result, record, options.out)
            if budget.spent:
                _store(result, Record("note", layer="budget",
                                      error="stopped: the budget was spent"), options.out)
                break
    except DeviceLost as problem:
        _store(result, Record("note", layer="device", error=f"device lost: {problem}"), options.out)
        status = 1
    return result, status


def report(result: Result, options) -> None:
    """The table and the plot, where asked for."""
    if options.table:
        from gnnaccel.profile.bench import table

        table.show(result, options.table)
    if options.plot:
        from gnnaccel.profile.bench import plot

        plot.draw(result, options.plot)
        progress(f"wrote {options.plot}")


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _store(result: Result, record: Record, path: str | None) -> None:
    result.records.append(record)
    if path:
        result.save(path)
    what = " ".join(part for part in (record.kind, record.shape, record.layer, record.mode,
                                      record.impl) if part)
    if record.error:
        said = record.error
    elif record.timing:
        said = f"{record.ms:.4g} ms"
    else:
        said = " ".join(f"{name}={value:.4g}" for name, value in record.values.items()
                        if isinstance(value, (int, float)))
    progress(f"{what}: {said}")
