"""Queue policies: what operators have set for a queue, and what a worker may start of it because of that."""
