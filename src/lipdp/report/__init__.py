"""Reports of private runs, from the folders that ``lipdp train --output`` fills: one HTML file that needs no network, and Markdown.

Only what may be published goes into them: the plan, the ledger, and metrics of records that were never protected.
"""

from lipdp.report.page import html, markdown, write, write_run
from lipdp.report.run import About, Evaluation, RunRecord, evaluate_run, read_run, this_environment, write_about

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
    "write_run",
]
