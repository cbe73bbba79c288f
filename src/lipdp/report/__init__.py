"""Reports of private runs: one HTML file without scripts or network, and Markdown, from the folders that ``lipdp train --output``
fills.

Only what may be published goes into them: the plan, the ledger, and metrics of records that were never protected (validation,
    test).
"""

from lipdp.report.evaluation import Evaluation, evaluate_run
from lipdp.report.page import html, markdown, write
from lipdp.report.run import About, RunRecord, read_run, this_environment, write_about

__all__ = [
    "About",
    "Evaluation",
    "RunRecord",
    "evaluate_run",
    "html",
    "markdown",
    "read_run",
    "this_environment",
    "write",
    "write_about",
]
