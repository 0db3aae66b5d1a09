"""`report.html`: one self-contained page about a run, for somebody who wasn't there.

    python -m postrl.report runs/quickstart

It holds no script and loads nothing, so that it opens anywhere, now and in ten years. A run that stopped half-way gets
a report as well, which says so.
"""

from postrl.report.page import write_report

__all__ = ["write_report"]
