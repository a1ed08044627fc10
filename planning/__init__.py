"""What fit.py, dry_run.py and a prediction know, by formula: memory, traffic, links, prediction."""
