"""What report.py knows, a file for each thing: records, comparing, splitting (a step), sentences,
pictures, page.
"""
