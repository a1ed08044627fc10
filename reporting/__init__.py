"""What report.py knows, a file for each thing: runs (their types), records, times (by hand),
comparing, splitting (a step), sentences, formulas, tables, pictures, page.
"""
