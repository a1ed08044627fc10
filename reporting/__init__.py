"""What report.py knows, a file for each thing: records, times (by hand), comparing, answer,
pictures, page.
"""
