"""What workers and duties share: sessions, the loop, the writer of outcomes, listening, the clock, metrics."""
