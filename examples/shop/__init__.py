"""A shop that takes orders in a transaction, and leaves what follows from them to tasks."""
