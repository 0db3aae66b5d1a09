"""`python -m postrl.report RUN_DIR` writes the report of a run, finished or not, and prints its path."""

import sys

from postrl.report.page import write_report

if len(sys.argv) != 2:
    sys.exit("usage: python -m postrl.report RUN_DIR")
try:
    print(write_report(sys.argv[1]))
except FileNotFoundError as error:
    sys.exit(str(error))
