"""What report.py and fit.py know, a file for each thing: records, comparing, splitting (a step),
sentences, links, prediction, memory, pictures, page.
"""
