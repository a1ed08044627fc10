"""What fit.py and dry_run.py know: what a device holds (by formula), what it sends (counted)."""
