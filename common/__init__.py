"""What several rooms need: the strategies, what a record says of its own, and printing."""
