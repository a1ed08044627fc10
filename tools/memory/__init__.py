"""What a device holds while a model trains: by formula (fit.py), and counted (dry_run.py)."""
