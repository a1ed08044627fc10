"""What fit.py, dry_run.py and verify.py know: what a device holds (by formula), what it sends
(counted), and whether ranks train as one process does.
"""
