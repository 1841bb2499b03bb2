"""The tables of the papers, from runs that are kept in benchmarks/results/papers.

``python benchmarks/papers.py`` runs what is missing at scale "large", table by table, and
``--write`` makes docs/papers.md of what there is; ``--table`` runs nothing. A run that is
interrupted continues where it was.
"""

from __future__ import annotations

import argparse
import sys
import textwrap

import bench

RESULTS = bench.ROOT / "benchmarks/results/papers"
DATA = bench.ROOT.parent / "shared/data"
PAGE = bench.ROOT / "docs/papers.md"
IMAGES = bench.ROOT / "docs/images"
SCALE = "large"
HEAD = """# Tables of the papers

Each table is what one command runs, `laplace-invariance reproduce NAME --scale large`: the order
that a paper claims, on as many images as two cores can do in some hours. `--scale paper` has the
size of the paper, for those with a GPU, and `--scale small` ends within minutes, on images that
come with scikit-learn. The command runs what is missing, continues what was interrupted, and prints
the table. Numbers are means over seeds, with the standard deviation and the number of seeds where
there are several; minutes and hours are of the clock, on a machine that other programs shared.
`make papers` makes this page from the files of the runs; what was not run says so.
"""


def page() -> str:
    """Return the page of all tables, from the results that are there."""
    from laplace_invariance.experiments.papers import TABLES
    from laplace_invariance.experiments.reproduce import ReproduceConfig, read_results

    parts = [HEAD.strip()]
    for name, table in TABLES.items():
        found = read_results(ReproduceConfig(name=name, scale=SCALE), RESULTS)
        parts += [
            f"## {table.title}",
            f"`laplace-invariance reproduce {name} --scale {SCALE}`",
            textwrap.fill(f"{table.source}. What the paper says: {table.claim}", 100),
            table.markdown(SCALE, found),
        ]
        if table.remark:
            parts.append(textwrap.fill(f"What does not hold here: {table.remark}", 100))
        if found and table.has_figure:
            parts.append(f"![{table.title}](images/papers-{name}.png)")
    return "\n\n".join(parts) + "\n"


def draw() -> None:
    """Draw the figures of tables that have runs."""
    from laplace_invariance.experiments.papers import TABLES
    from laplace_invariance.experiments.reproduce import ReproduceConfig, read_results
    from laplace_invariance.experiments.table_pictures import draw_table

    for name, table in TABLES.items():
        found = read_results(ReproduceConfig(name=name, scale=SCALE), RESULTS)
        draw_table(table, SCALE, found, IMAGES, f"papers-{name}.png")


def main() -> None:
    """Run what is missing, and print or write the page."""
    from laplace_invariance.experiments.jobs import FailedRuns
    from laplace_invariance.experiments.papers import TABLES
    from laplace_invariance.experiments.reproduce import ReproduceConfig, reproduce

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=list(TABLES), help="tables, by default all")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time")
    parser.add_argument("--root", default=str(DATA), help="directory of the data sets")
    parser.add_argument("--table", action="store_true", help="print the page, run nothing")
    parser.add_argument("--write", action="store_true", help="keep the page in docs/papers.md")
    arguments = parser.parse_args()
    for name in [] if arguments.table else arguments.names:
        config = ReproduceConfig(name=name, scale=SCALE, n_jobs=arguments.jobs, root=arguments.root)
        try:
            reproduce(config, RESULTS, progress_bar=True)
        except FailedRuns as error:
            print(f"{name}: {error}", file=sys.stderr, flush=True)
    print(page())
    if arguments.write:
        PAGE.write_text(page())
        draw()


if __name__ == "__main__":
    main()
