"""What several rooms need: the strategies, what a GPU can do, and printing."""
