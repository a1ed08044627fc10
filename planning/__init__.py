"""What fit.py, dry_run.py and verify.py know about memory, collectives and equal training."""
